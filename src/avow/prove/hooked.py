"""``python -m avow.prove.hooked run FILE ...``: avow's command line with the hooks that the environment names.

The proof, the demo and the tests start pipelines this way; ``avow`` itself has no door for hooks. A module of its own,
and not ``failpoints``, so that the hooks can be pickled into tasks by the name of their module.
"""

from __future__ import annotations

import os
from importlib import import_module

from avow.prove.failpoints import FaultHooks

if __name__ == "__main__":
    # By name: the command line stands above this package, and is another program here.
    import_module("avow.cli").main(obj=FaultHooks.from_environment(os.environ), prog_name="avow")
