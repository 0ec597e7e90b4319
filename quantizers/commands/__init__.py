"""One module a command: functions with plain arguments that return dataclasses, which `import quantizers` offers.

`quantizers/cli` parses arguments, calls these, and prints what they return.
"""
