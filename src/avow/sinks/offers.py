"""What each guarantee comes to in a table, by mode: the same for every sink whose rows are in one."""

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
                Guarantee.AT_MOST_ONCE: "What a record gives is in the table at most once; a crash can lose it.",
                Guarantee.AT_LEAST_ONCE: "What a record gives is in the table; a crash can put it there twice.",
                Guarantee.EXACTLY_ONCE: "What a record gives is in the table exactly once.",
            }
        ),
        "dedupe": Offer(
            {
                Guarantee.AT_MOST_ONCE: "At most one row per key; a crash can lose the first record of a key, "
                "and then a later one takes its place, or none.",
                Guarantee.AT_LEAST_ONCE: "One row per key, also after a crash: what is written again meets its "
                "own key and is skipped.",
                Guarantee.EXACTLY_ONCE: "One row per key, from the first record that brought it.",
            }
        ),
        "upsert": Offer(
            {
                Guarantee.AT_MOST_ONCE: "One row per key; a crash can lose a change, and the row stays as it was "
                "until the key's next record.",
                Guarantee.AT_LEAST_ONCE: "One row per key, from its last record: what is written again has no "
                "later offset and changes nothing, unless its row was deleted meanwhile.",
                Guarantee.EXACTLY_ONCE: "One row per key, from its last record; a null value deletes it.",
            }
        ),
    }
)
