"""The types of request parameters' fields: what Kafka allows as a name, a partition or an offset."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import BeforeValidator, Field

# A form sends a field that was left empty as an empty string.
EMPTY_AS_NONE = BeforeValidator(lambda value: None if value == "" else value)

TopicName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9._-]{1,249}$")]
GroupName = Annotated[str, Field(min_length=1, max_length=255)]
PartitionNumber = Annotated[int, Field(ge=0, le=2**31 - 1)]
Offset = Annotated[int, Field(ge=0, le=2**63 - 2)]
OptionalPartition = Annotated[PartitionNumber | None, EMPTY_AS_NONE]
OptionalOffset = Annotated[Offset | None, EMPTY_AS_NONE]
OptionalTime = Annotated[datetime | None, EMPTY_AS_NONE]  # UTC unless it has a zone
