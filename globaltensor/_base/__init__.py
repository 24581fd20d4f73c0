"""What everything may use: torch's private names, patches, pytrees. It knows no layout and no
ranks."""
