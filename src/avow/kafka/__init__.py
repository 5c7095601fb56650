"""Everything that talks to Kafka: connections, admin requests, the log, readers, the group member."""
