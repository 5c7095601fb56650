CREATE TABLE IF NOT EXISTS charges (account text NOT NULL, amount bigint NOT NULL CHECK (amount > 0));
CREATE TABLE IF NOT EXISTS accounts (account text PRIMARY KEY, last_amount bigint NOT NULL);
