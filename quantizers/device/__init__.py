"""The device: its threads, allocator, timers, and the settings that decide the bits of a result."""
