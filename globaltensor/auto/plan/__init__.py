"""The plan as data, and its presentations: report, explanation and HTML page."""
