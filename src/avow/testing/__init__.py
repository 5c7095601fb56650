"""For tests of plugins: the contracts of a sink (``sinks``) and of a format (``formats``), as pytest classes.

``install`` registers a plugin that is not installed.
"""

import pytest

# A test that fails there then says what was found.
pytest.register_assert_rewrite("avow.testing.formats", "avow.testing.sinks")
