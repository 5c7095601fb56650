"""Loads the fixture plugins, one per real service. Here and not by ``-p``, so that coverage starts first."""

from hypothesis import settings

pytest_plugins = ["tests.fix_cluster", "tests.fix_pipeline", "tests.fix_sinks", "tests.fix_dashboard"]

# The same examples every time, and no clock: a test run tells of the code, not of the day or of a busy machine.
settings.register_profile("avow", derandomize=True, deadline=None)
settings.load_profile("avow")
