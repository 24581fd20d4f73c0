"""What each way of running a call costs."""
