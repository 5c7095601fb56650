"""A service that tells its callers what became of their orders: ``python service.py orders.toml [PORT]``.

POST /orders with a JSON body sends the body as a record, waits for its receipt, and answers 201 (written), 422
(dead-lettered, with the reason) or 202 (Kafka has it, the table not yet: ask GET /receipts/TOPIC/PARTITION/OFFSET).
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from avow import AvowError, Pipeline, Producer, Receipt
from avow.clients.receipts import Answer, State

PIPELINE = Pipeline.load(sys.argv[1])
TOPIC = PIPELINE.config.source.topics[0]
RECEIPTS = PIPELINE.receipts()
PRODUCER = Producer(PIPELINE.config.source.brokers, guarantee="exactly-once")

PATIENCE_S = 2.0  # a caller waits no longer than this for the table
BODY_MAX = 100_000
STATUS = {State.WRITTEN: 201, State.DEAD_LETTERED: 422, State.NOT_YET: 202}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if self.path != "/orders" or not 0 < length <= BODY_MAX:
            return self.reply(400, {"error": f"POST /orders, with a body of at most {BODY_MAX} bytes"})
        try:
            # Waits for the acknowledgement, which has the position; the error says whether it failed or is unknown.
            place = PRODUCER.send(TOPIC, self.rfile.read(length)).wait()
        except AvowError as error:
            return self.reply(503, {"error": str(error)})
        if place is None:  # a second attempt, of which the broker knew the first
            return self.reply(202, {"state": "unknown", "detail": "Kafka has it, and does not say where"})
        receipt = RECEIPTS.receipt(place)
        try:
            return self.tell(receipt.wait(PATIENCE_S))
        except AvowError as error:
            # Kafka has the record: it is not lost, only what became of it cannot be asked now.
            return self.reply(202, {"record": str(receipt), "state": "unknown", "detail": str(error)})

    def do_GET(self) -> None:
        match self.path.strip("/").split("/"):
            case ["receipts", topic, partition, offset] if partition.isdigit() and offset.isdigit():
                try:
                    return self.tell(RECEIPTS.look(Receipt(topic, int(partition), int(offset))))
                except AvowError as error:
                    return self.reply(503, {"error": str(error)})
            case _:
                return self.reply(404, {"error": "GET /receipts/TOPIC/PARTITION/OFFSET"})

    def tell(self, answer: Answer) -> None:
        self.reply(STATUS.get(answer.state, 200), {"record": str(answer.receipt), **answer.as_json()})

    def reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing: the answers say it all."""


def main() -> None:
    port = int(sys.argv[2]) if len(sys.argv) > 2 else 8080
    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        print(f"listening on http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
