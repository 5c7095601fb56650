"""What moves records: ``task`` is the work on one partition's offset range, ``spark`` plans ranges and runs tasks."""
