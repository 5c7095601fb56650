"""Orders and their payments, in two topics, both or neither: ``python order.py --brokers HOST:PORT``.

Every fourth order fails on its way, after it was sent and before its payment was. Readers of committed records see no
trace of it.
"""

from __future__ import annotations

import argparse
import json

from avow import Producer


class OutOfStock(Exception):
    """What a shop has to reckon with."""


def take(producer: Producer, number: int, orders: str, payments: str) -> None:
    """One order with its payment, in one transaction."""
    with producer.transaction():
        producer.send(orders, json.dumps({"order": number}), key=str(number), idempotency_key=f"order-{number}")
        if number % 4 == 3:
            raise OutOfStock(number)  # takes back what was sent
        payment = {"order": number, "amount": number * 10}
        producer.send(payments, json.dumps(payment), key=str(number), idempotency_key=f"payment-{number}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--brokers", required=True)
    parser.add_argument("--orders", default="orders")
    parser.add_argument("--payments", default="payments")
    parser.add_argument("--count", type=int, default=20)
    given = parser.parse_args()
    refused = 0
    # A second shop with this transactional id takes over, and ends what the first left open.
    with Producer(given.brokers, guarantee="exactly-once", transactional_id="shop-1") as producer:
        for number in range(given.count):
            try:
                take(producer, number, given.orders, given.payments)
            except OutOfStock:
                refused += 1
    print(f"{given.count - refused} orders taken, {refused} refused; {producer.totals}")


if __name__ == "__main__":
    main()
