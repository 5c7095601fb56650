"""What formats with schemas share, whatever their language: ``config`` (``[decode]``, and where the reader's schema is
from), ``frame`` (the bytes before a value that name its writer's schema), ``decoder`` (which record is read by which).
"""
