"""The device: its threads, allocator, timers, and the settings that decide the bits of a result.

How much memory a layer needs there is planned in `planning/`.
"""
