"""What the tests of this room share."""

from .samples import root as root
from .samples import samples as samples
