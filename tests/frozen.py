"""The last module that the fork server imports.

What there is by now is garbage in no worker, so none need look at it.
"""

import gc

gc.collect()
gc.freeze()
