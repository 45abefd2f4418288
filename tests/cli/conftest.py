"""What the tests of this room share."""

from ..checkpoint.samples import root as root
from ..checkpoint.samples import samples as samples
