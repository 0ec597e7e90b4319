"""What the work on a layer costs: its own code run on torch's meta device, where nothing is computed, and counted."""
