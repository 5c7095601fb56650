"""``python -m avow`` is the command ``avow``."""

from avow.cli import main

main(prog_name="avow")
