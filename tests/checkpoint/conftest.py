"""What the tests of this room share."""

from .object_store import _s3_server as _s3_server
from .object_store import s3 as s3
from .samples import root as root
from .samples import samples as samples
