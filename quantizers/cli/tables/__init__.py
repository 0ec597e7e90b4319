"""What the commands print at their end, as text made from a report."""
