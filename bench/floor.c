/*
 * The floor: how cheaply Kafka -> JSON -> PostgreSQL can be had at all, exactly-once, on this machine.
 *
 *     floor BROKERS TOPIC URL TABLE COLUMNS THREADS ROWS
 *
 * Each thread has a client of its own and every THREADS-th partition. It reads from the positions in the table
 * floor_positions to the ends of its partitions, parses each value, and sends rows as binary COPY. A transaction of
 * ROWS rows, or fewer large ones, also moves the positions of its partitions, so that a row is written once. COLUMNS
 * are names and types in the order of the fields: id:l,account:s,amount:d,at:t for long, string, double, timestamp.
 *
 * It reads what the bench produces and nothing else: fields in this order, none missing, no null, no escapes, times
 * like 2026-01-01T00:00:00.000000Z. Anything else ends it. That is less than a pipeline must do: it is a bound.
 *
 * The libraries are those inside the wheels of confluent-kafka and psycopg-binary, which have no headers: what is
 * declared here is their public ABI. floor.py compiles and links it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

/* ---- librdkafka ---- */

typedef struct rd_kafka_s rd_kafka_t;
typedef struct rd_kafka_conf_s rd_kafka_conf_t;
typedef struct rd_kafka_queue_s rd_kafka_queue_t;

typedef struct {
    char *topic;
    int32_t partition;
    int64_t offset; /* more follows, which only librdkafka touches */
} rd_kafka_topic_partition_t;

typedef struct rd_kafka_topic_partition_list_s rd_kafka_topic_partition_list_t;

typedef struct {
    int err;
    void *rkt;
    int32_t partition;
    void *payload;
    size_t len;
    void *key;
    size_t key_len;
    int64_t offset;
    void *private_;
} rd_kafka_message_t;

enum { CONSUMER = 1, PARTITION_EOF = -191 };

rd_kafka_conf_t *rd_kafka_conf_new(void);
int rd_kafka_conf_set(rd_kafka_conf_t *, const char *name, const char *value, char *error, size_t);
rd_kafka_t *rd_kafka_new(int type, rd_kafka_conf_t *, char *error, size_t);
rd_kafka_topic_partition_list_t *rd_kafka_topic_partition_list_new(int size);
rd_kafka_topic_partition_t *rd_kafka_topic_partition_list_add(rd_kafka_topic_partition_list_t *, const char *, int32_t);
void rd_kafka_topic_partition_list_destroy(rd_kafka_topic_partition_list_t *);
int rd_kafka_poll_set_consumer(rd_kafka_t *);
int rd_kafka_assign(rd_kafka_t *, const rd_kafka_topic_partition_list_t *);
rd_kafka_queue_t *rd_kafka_queue_get_consumer(rd_kafka_t *);
ssize_t rd_kafka_consume_batch_queue(rd_kafka_queue_t *, int timeout_ms, rd_kafka_message_t **, size_t);
int64_t rd_kafka_message_timestamp(const rd_kafka_message_t *, int *type);
const char *rd_kafka_message_errstr(const rd_kafka_message_t *);
void rd_kafka_message_destroy(rd_kafka_message_t *);

/* ---- libpq ---- */

typedef struct pg_conn PGconn;
typedef struct pg_result PGresult;

enum { CONNECTION_OK = 0, COMMAND_OK = 1, TUPLES_OK = 2, COPY_IN = 4 };

PGconn *PQconnectdb(const char *url);
int PQstatus(const PGconn *);
char *PQerrorMessage(const PGconn *);
PGresult *PQexec(PGconn *, const char *);
PGresult *PQgetResult(PGconn *);
int PQresultStatus(const PGresult *);
int PQntuples(const PGresult *);
char *PQgetvalue(const PGresult *, int row, int column);
char *PQcmdTuples(PGresult *);
void PQclear(PGresult *);
int PQputCopyData(PGconn *, const char *, int);
int PQputCopyEnd(PGconn *, const char *error);

/* ---- What all threads share ---- */

enum { COLUMNS_MAX = 1000, NAME_MAX_BYTES = 64, MESSAGES = 2000, WAIT_MS = 5, SEND_BYTES = 128 * 1024, TRANSACTION_BYTES = 8 << 20 };

struct column {
    char before[NAME_MAX_BYTES + 8]; /* what stands before the value: {"id": or ,"id": */
    size_t length;
    char type;
};

static struct {
    const char *brokers, *topic, *url, *table;
    struct column columns[COLUMNS_MAX];
    int columns_count, threads;
    int64_t rows; /* of a transaction, at most */
} given;

_Noreturn __attribute__((format(printf, 1, 2))) static void die(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vfprintf(stderr, format, values);
    va_end(values);
    fputc('\n', stderr);
    exit(1);
}

/* ---- Binary COPY ---- */

struct buffer {
    char *data;
    size_t size, room;
};

static void reserve(struct buffer *b, size_t more) {
    if (b->size + more <= b->room) return;
    b->room = 2 * (b->size + more);
    b->data = realloc(b->data, b->room);
    if (b->data == NULL) die("no memory");
}

/* What these append, put_row has reserved. */
static inline void put(struct buffer *b, const void *bytes, size_t count) {
    memcpy(b->data + b->size, bytes, count);
    b->size += count;
}

static inline void put_int16(struct buffer *b, int16_t value) {
    uint16_t swapped = htons((uint16_t)value);
    put(b, &swapped, sizeof swapped);
}

static inline void put_int32(struct buffer *b, int32_t value) {
    uint32_t swapped = htonl((uint32_t)value);
    put(b, &swapped, sizeof swapped);
}

static inline void put_long(struct buffer *b, int64_t value) {
    put_int32(b, 8);
    put_int32(b, (int32_t)(value >> 32));
    put_int32(b, (int32_t)value);
}

static inline void put_text(struct buffer *b, const char *text, size_t size) {
    put_int32(b, (int32_t)size);
    put(b, text, size);
}

static const int64_t POSTGRES_EPOCH_US = 946684800000000; /* 2000-01-01, after 1970-01-01 */

/* ---- Values of one record, from JSON straight into COPY data ---- */

static inline int digits(const char **at, const char *end, int64_t *value) {
    const char *first = *at;
    for (; *at < end && (unsigned)(**at - '0') < 10; (*at)++)
        if (__builtin_mul_overflow(*value, 10, value) || __builtin_add_overflow(*value, **at - '0', value)) return 0;
    return (int)(*at - first);
}

static inline int parse_long(const char **at, const char *end, struct buffer *b) {
    int64_t value = 0;
    int negative = *at < end && **at == '-';
    *at += negative;
    if (!digits(at, end, &value)) return 0;
    put_long(b, negative ? -value : value);
    return 1;
}

/* Up to 2^53 and 10^22 both numbers are exact, so that one division rounds as it should. */
static inline int parse_double(const char **at, const char *end, struct buffer *b) {
    int64_t value = 0, bits;
    double scale = 1;
    int negative = *at < end && **at == '-', fraction = 0;
    *at += negative;
    if (!digits(at, end, &value)) return 0;
    if (*at < end && **at == '.') {
        ++*at;
        fraction = digits(at, end, &value);
        if (!fraction) return 0;
    }
    if (value > (INT64_C(1) << 53) || fraction > 22) return 0;
    while (fraction--) scale *= 10;
    double number = (negative ? -1.0 : 1.0) * (double)value / scale;
    memcpy(&bits, &number, sizeof bits);
    put_long(b, bits);
    return 1;
}

/* The text between two quotes; NULL if there is none, or one with escapes. */
static inline const char *string(const char **at, const char *end, size_t *size) {
    if (*at == end || **at != '"') return NULL;
    const char *begin = ++*at, *close = memchr(begin, '"', (size_t)(end - begin));
    if (close == NULL || memchr(begin, '\\', (size_t)(close - begin)) != NULL) return NULL;
    *size = (size_t)(close - begin);
    *at = close + 1;
    return begin;
}

/* Howard Hinnant's days_from_civil, for years that are not negative. */
static int64_t days_since_1970(int64_t year, int64_t month, int64_t day) {
    year -= month <= 2;
    int64_t era = year / 400, of_era = year % 400;
    int64_t of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
    return era * 146097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719468;
}

static inline int parse_timestamp(const char **at, const char *end, struct buffer *b) {
    static const char form[] = "dddd-dd-ddTdd:dd:dd.ddddddZ"; /* d: a digit */
    int64_t number[7] = {0};                                   /* year to second, microseconds */
    int part = 0;
    size_t size;
    const char *text = string(at, end, &size);
    if (text == NULL || size != sizeof form - 1) return 0;
    for (size_t i = 0; i < size; i++) {
        if (form[i] != 'd') {
            if (text[i] != form[i]) return 0;
            part++;
        } else {
            if ((unsigned)(text[i] - '0') >= 10) return 0;
            number[part] = number[part] * 10 + (text[i] - '0');
        }
    }
    int64_t seconds = (days_since_1970(number[0], number[1], number[2]) * 24 + number[3]) * 3600;
    put_long(b, (seconds + number[4] * 60 + number[5]) * 1000000 + number[6] - POSTGRES_EPOCH_US);
    return 1;
}

static inline int parse_string(const char **at, const char *end, struct buffer *b) {
    size_t size;
    const char *text = string(at, end, &size);
    if (text == NULL) return 0;
    put_text(b, text, size);
    return 1;
}

static inline int parse_value(char type, const char **at, const char *end, struct buffer *b) {
    switch (type) {
        case 'l': return parse_long(at, end, b);
        case 's': return parse_string(at, end, b);
        case 'd': return parse_double(at, end, b);
        case 't': return parse_timestamp(at, end, b);
        default: return 0;
    }
}

static int parse_record(const char *at, const char *end, struct buffer *b) {
    for (const struct column *c = given.columns; c < given.columns + given.columns_count; c++) {
        if ((size_t)(end - at) < c->length || memcmp(at, c->before, c->length) != 0) return 0;
        at += c->length;
        if (!parse_value(c->type, &at, end, b)) return 0;
    }
    return at + 1 == end && *at == '}';
}

/* The value's columns, and where it came from: topic, partition, offset, timestamp. */
static void put_row(struct buffer *b, const rd_kafka_message_t *m) {
    size_t columns = (size_t)given.columns_count, topic = strlen(given.topic);
    const char *value = m->payload;
    int type;
    /* No value is longer as COPY data than as JSON, but for its length and a number's 8 bytes. */
    reserve(b, m->len + topic + 12 * (columns + 8));
    put_int16(b, (int16_t)(columns + 4));
    if (value == NULL || !parse_record(value, value + m->len, b))
        die("cannot parse %d/%lld: %.*s", m->partition, (long long)m->offset, (int)m->len, value ? value : "");
    put_text(b, given.topic, topic);
    put_int32(b, 4);
    put_int32(b, m->partition);
    put_long(b, m->offset);
    put_long(b, rd_kafka_message_timestamp(m, &type) * 1000 - POSTGRES_EPOCH_US);
}

/* ---- One thread ---- */

struct position {
    int64_t committed, next;
    int at_end;
};

struct worker {
    pthread_t thread;
    PGconn *postgres;
    rd_kafka_queue_t *queue;
    struct position *positions; /* by partition; of this thread's, every one that is its own */
    int number, partitions, left; /* left: own partitions whose end was not reached yet */
    int64_t rows, bytes;          /* of the transaction that is open; 0: none is */
    struct buffer copy, sql;
};

static PGresult *expect(PGconn *postgres, PGresult *result, int status) {
    if (PQresultStatus(result) != status) die("%s", PQerrorMessage(postgres));
    return result;
}

static void execute(PGconn *postgres, const char *sql, int status) {
    PQclear(expect(postgres, PQexec(postgres, sql), status));
}

__attribute__((format(printf, 2, 3))) static void put_sql(struct buffer *b, const char *format, ...) {
    va_list values;
    reserve(b, 512);
    va_start(values, format);
    int size = vsnprintf(b->data + b->size, 512, format, values);
    va_end(values);
    if (size < 0 || size >= 512) die("a name is too long");
    b->size += (size_t)size;
}

static void begin(struct worker *w) {
    w->sql.size = 0;
    put_sql(&w->sql, "COPY %s FROM STDIN (FORMAT binary)", given.table);
    execute(w->postgres, "BEGIN", COMMAND_OK);
    execute(w->postgres, w->sql.data, COPY_IN);
    reserve(&w->copy, 19);
    put(&w->copy, "PGCOPY\n\377\r\n\0" "\0\0\0\0" "\0\0\0\0", 19);
}

static void send_copy(struct worker *w) {
    if (w->copy.size && PQputCopyData(w->postgres, w->copy.data, (int)w->copy.size) != 1)
        die("%s", PQerrorMessage(w->postgres));
    w->copy.size = 0;
}

static void expect_rows(struct worker *w, PGresult *result, int64_t rows) {
    expect(w->postgres, result, COMMAND_OK);
    if (atoll(PQcmdTuples(result)) != rows) die("%s rows instead of %lld", PQcmdTuples(result), (long long)rows);
    PQclear(result);
}

/* Moves the positions in the same transaction; it fails if another has moved one of them. */
static void move_positions(struct worker *w) {
    int moved = 0;
    w->sql.size = 0;
    put_sql(&w->sql, "UPDATE floor_positions p SET position = v.next FROM (VALUES ");
    for (int partition = w->number; partition < w->partitions; partition += given.threads) {
        struct position *p = &w->positions[partition];
        if (p->next == p->committed) continue;
        put_sql(&w->sql, "%s(%d, %lld::bigint, %lld::bigint)", moved++ ? ", " : "", partition,
                (long long)p->committed, (long long)p->next);
        p->committed = p->next;
    }
    put_sql(&w->sql, ") v (number, committed, next) WHERE p.name = '%s' AND p.number = v.number", given.table);
    put_sql(&w->sql, " AND p.position = v.committed");
    expect_rows(w, PQexec(w->postgres, w->sql.data), moved);
}

static void commit(struct worker *w) {
    reserve(&w->copy, 2);
    put_int16(&w->copy, -1);
    send_copy(w);
    if (PQputCopyEnd(w->postgres, NULL) != 1) die("%s", PQerrorMessage(w->postgres));
    expect_rows(w, PQgetResult(w->postgres), w->rows);
    for (PGresult *more; (more = PQgetResult(w->postgres)) != NULL;) PQclear(more);
    move_positions(w);
    execute(w->postgres, "COMMIT", COMMAND_OK);
    w->rows = w->bytes = 0;
}

static void take(struct worker *w, const rd_kafka_message_t *m) {
    struct position *p = &w->positions[m->partition];
    if (m->err == PARTITION_EOF) {
        w->left -= !p->at_end;
        p->at_end = 1;
        return;
    }
    if (m->err) die("%s", rd_kafka_message_errstr(m));
    if (w->rows++ == 0) begin(w);
    put_row(&w->copy, m);
    p->next = m->offset + 1;
    w->bytes += (int64_t)m->len;
    if (w->copy.size >= SEND_BYTES) send_copy(w);
    if (w->rows >= given.rows || w->bytes >= TRANSACTION_BYTES) commit(w);
}

static void *drain(void *argument) {
    struct worker *w = argument;
    rd_kafka_message_t *messages[MESSAGES];
    while (w->left) {
        ssize_t count = rd_kafka_consume_batch_queue(w->queue, WAIT_MS, messages, MESSAGES);
        if (count < 0) die("librdkafka gives no messages");
        for (ssize_t i = 0; i < count; i++) {
            take(w, messages[i]);
            rd_kafka_message_destroy(messages[i]);
        }
    }
    if (w->rows) commit(w);
    return NULL;
}

/* ---- Before it ---- */

static rd_kafka_t *consumer(void) {
    /* Much is fetched ahead, so that no thread waits for a broker. */
    const char *settings[][2] = {{"bootstrap.servers", given.brokers},      {"group.id", "floor"},
                                 {"enable.auto.commit", "false"},           {"enable.partition.eof", "true"},
                                 {"isolation.level", "read_committed"},     {"check.crcs", "true"},
                                 {"auto.offset.reset", "error"},            {"queued.min.messages", "100000"},
                                 {"queued.max.messages.kbytes", "65536"},   {"fetch.wait.max.ms", "50"},
                                 {"fetch.queue.backoff.ms", "5"}};
    char error[512];
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    for (size_t i = 0; i < sizeof settings / sizeof settings[0]; i++)
        if (rd_kafka_conf_set(conf, settings[i][0], settings[i][1], error, sizeof error) != 0) die("%s", error);
    rd_kafka_t *client = rd_kafka_new(CONSUMER, conf, error, sizeof error);
    if (client == NULL) die("%s", error);
    rd_kafka_poll_set_consumer(client);
    return client;
}

static void read_positions(struct worker *w) {
    put_sql(&w->sql, "SELECT position FROM floor_positions WHERE name = '%s' ORDER BY number", given.table);
    PGresult *found = expect(w->postgres, PQexec(w->postgres, w->sql.data), TUPLES_OK);
    w->partitions = PQntuples(found);
    w->positions = calloc((size_t)w->partitions, sizeof *w->positions);
    if (w->positions == NULL) die("no positions in floor_positions");
    for (int i = 0; i < w->partitions; i++)
        w->positions[i].committed = w->positions[i].next = atoll(PQgetvalue(found, i, 0));
    PQclear(found);
}

static void start(struct worker *w, int number) {
    w->number = number;
    w->postgres = PQconnectdb(given.url);
    if (PQstatus(w->postgres) != CONNECTION_OK) die("%s", PQerrorMessage(w->postgres));
    read_positions(w);
    rd_kafka_t *client = consumer();
    w->queue = rd_kafka_queue_get_consumer(client);
    rd_kafka_topic_partition_list_t *own = rd_kafka_topic_partition_list_new(w->partitions);
    for (int partition = number; partition < w->partitions; partition += given.threads, w->left++)
        rd_kafka_topic_partition_list_add(own, given.topic, partition)->offset = w->positions[partition].next;
    if (rd_kafka_assign(client, own) != 0) die("cannot assign the partitions");
    rd_kafka_topic_partition_list_destroy(own);
    if (pthread_create(&w->thread, NULL, drain, w) != 0) die("cannot start a thread");
}

static void read_columns(char *text) {
    for (char *name = strtok(text, ","); name != NULL; name = strtok(NULL, ",")) {
        struct column *c = &given.columns[given.columns_count];
        char *colon = strchr(name, ':');
        if (colon == NULL || colon - name > NAME_MAX_BYTES || given.columns_count++ == COLUMNS_MAX)
            die("a column is NAME:TYPE, not %s", name);
        c->length = (size_t)sprintf(c->before, "%c\"%.*s\":", c == given.columns ? '{' : ',', (int)(colon - name), name);
        c->type = colon[1];
    }
}

int main(int count, char **arguments) {
    if (count != 8) die("floor BROKERS TOPIC URL TABLE COLUMNS THREADS ROWS");
    given.brokers = arguments[1], given.topic = arguments[2], given.url = arguments[3], given.table = arguments[4];
    read_columns(arguments[5]);
    given.threads = atoi(arguments[6]), given.rows = atoll(arguments[7]);
    struct worker *workers = calloc((size_t)given.threads, sizeof *workers);
    if (workers == NULL) die("THREADS is at least 1");
    for (int i = 0; i < given.threads; i++) start(&workers[i], i);
    for (int i = 0; i < given.threads; i++) pthread_join(workers[i].thread, NULL);
    exit(0); /* without closing clients: nothing is left to do, and all memory goes with the process */
}
