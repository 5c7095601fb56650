"""What avow asks of Kafka: metadata, and later producing, consuming and telling groups their positions."""
