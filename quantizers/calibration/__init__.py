"""Declarative calibration sets: read, loaded, proven, pinned, shown.

set        the schema of a set's YAML          loading    a set ─► samples, the whole way
shapes     a row of data ─► a conversation     tokens     a conversation ─► token ids
sources    local files                         hub        data sets on the Hub
take       enough good rows of each source     parallel   several sources at a time
lock       exact versions beside a set         cache      results, for runs without network
report     what a set holds, and whether that is what it claims (duplicates, spoken, diff, view)
"""

from .data import CalibrationData, Dropped, Sample
from .loading import Progress, load_samples
from .set import CalibrationSet, read_set

__all__ = ["CalibrationData", "CalibrationSet", "Dropped", "Progress", "Sample", "load_samples", "read_set"]
