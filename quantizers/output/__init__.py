"""The output folder of a run: its journal, the final move, and the record at the end; other rooms make the contents."""
