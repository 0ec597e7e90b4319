"""What computes: the device, its threads, its allocator and its timers, and what of it decides bits."""
