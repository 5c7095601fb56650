"""Loads the fixture plugins, one per real service. Here and not by ``-p``, so that coverage starts first."""

pytest_plugins = ["tests.fix_cluster", "tests.fix_pipeline"]
