"""One module a command: functions with plain arguments that return dataclasses, which `import quantizers` offers.

`quantizers/cli` parses arguments, calls these, and prints what they return. An argument means what `quantize COMMAND
--help` and docs/commands.md say of the option; the functions' docstrings add only what Python takes otherwise. In all:

    settings       keys of the recipe to override, as {"experts.group_size": 64} or KEY=VALUE; None removes a key
    facts          the user's own architecture spec, instead of one that the recipe names or an output carries
    device_memory  bytes
    work           None for a temporary folder
    command        what the user typed, named where the folder is found unfinished
    dist           the processes that share the work; each of them calls the function
"""
