"""Model families as data: one YAML file each, and the code that reads and checks them.

A new family is a new file here. No code may depend on the name of a family.
"""
