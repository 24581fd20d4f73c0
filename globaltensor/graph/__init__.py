"""The static graph: captured once, planned, and run as one program per rank."""
