"""What each guarantee means for a table, by mode: the same for every sink that writes to one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from avow.guarantee import Guarantee
from avow.settings import Mode
from avow.sinks.base import Offer

TABLE_OFFERS: Mapping[Mode, Offer] = MappingProxyType(
    {
        "append": Offer(
            {
                Guarantee.AT_MOST_ONCE: "The table has each record's rows at most once; a crash can lose them.",
                Guarantee.AT_LEAST_ONCE: "The table has each record's rows at least once; a crash can duplicate them.",
                Guarantee.EXACTLY_ONCE: "The table has each record's rows exactly once.",
            }
        ),
        "dedupe": Offer(
            {
                Guarantee.AT_MOST_ONCE: "At most one row per key; a crash can lose the first record of a key, "
                "and then the row comes from a later record, or there is none.",
                Guarantee.AT_LEAST_ONCE: "One row per key, also after a crash: a record that is written again finds "
                "its key in the table and is skipped.",
                Guarantee.EXACTLY_ONCE: "One row per key, from the first record with that key.",
            }
        ),
        "upsert": Offer(
            {
                Guarantee.AT_MOST_ONCE: "One row per key; a crash can lose a change, and the row stays as it was "
                "until the key's next record.",
                Guarantee.AT_LEAST_ONCE: "One row per key, from its last record: a record that is written again has no "
                "later offset and changes nothing, unless its row was deleted in between.",
                Guarantee.EXACTLY_ONCE: "One row per key, from its last record; a null value deletes it.",
            }
        ),
    }
)
