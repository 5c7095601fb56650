/*
 * Kafka messages into Arrow buffers, without a Python object per record.
 *
 * Theory of operation
 * -------------------
 * The confluent-kafka wheel bundles librdkafka. This file uses that very library and the very client handle that a
 * confluent_kafka.Consumer owns: settings, logins, callbacks, assigning and closing stay in Python. Only taking fetched
 * messages happens here. There are no librdkafka headers and nothing is linked: kafka.py looks the functions up and
 * hands them over as a table (struct kafka_api). What is declared here of librdkafka is its public ABI: the functions,
 * rd_kafka_message_t and one error code. client.py refuses versions that this file was not written for.
 *
 * Messages are taken from a queue of their own, never from the consumer's queue. The consumer's queue also holds
 * callbacks (errors, rebalances, OAuth tokens, logs), and confluent-kafka's callbacks end the process if they are
 * called from outside one of its own calls: they look for the Python thread's state that such a call has left for them.
 * So the fetch queue of a partition is cut off from the consumer's queue, before the partition is assigned, and holds
 * only messages, errors of this partition and its end. Python polls the consumer's queue, for the rest.
 *
 *     struct source   the queue of one partition, and the part that its messages go into
 *     struct part     the records of a partition since the last batch, as growing Arrow buffers
 *     struct waiter   a pipe that librdkafka writes to when an empty queue gets something: one wait for many sources
 *
 * The queue is read itself and not forwarded to one of ours: librdkafka removes the forwarding of a partition when it
 * stops fetching it, which happens in another thread some time after "unassign" has returned, and so maybe after the
 * next range of the same partition has set its own. Being cut off lasts as long as the client: whoever has opened a
 * source of a partition cannot have its messages from the consumer's queue any more.
 *
 * sources_take takes what is there, up to a bound in records and bytes, and does not wait. Messages are popped a chunk at
 * a time, copied, and destroyed before the next chunk: no message outlives a call, on any path. Who finds nothing waits
 * at the waiter, also for callbacks:
 * librdkafka writes when a queue that was read empty gets its first message, so a message that comes between the take
 * and the wait ends the wait at once. A queue must stop writing before the pipe is closed, whose number another file
 * may get: sources are closed before their waiter, and the waiter before the client.
 *
 * Arrow's layout: a column of bytes is a bitmap (1 = not null), int32 ends (one more than rows, the first 0) and the
 * bytes. Headers are a list column (bitmap, ends) over two such columns, names and values. Fixed-width columns are
 * plain arrays. Python wraps these buffers without copying them, and frees the part when Arrow lets go of the last one.
 *
 * Failures: a message that is an error, or a fault of ours (no memory, more bytes than int32 ends can count, a record
 * of a partition that was not asked for). Either is described in struct result, and nothing more is appended. The
 * part may then be uneven: it can only be freed.
 *
 * Threads: a source and its part belong to one thread at a time. kafka_setup is called once, before anything else.
 */
#include <stdlib.h>
#include <string.h>

#include "client.h"

#if !defined(_WIN32)
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>
#endif

/* ---- librdkafka's public ABI, as far as it is used: see client.h ---- */

typedef struct {
    int err; /* an enum of librdkafka's */
    rd_kafka_topic_t *rkt;
    int32_t partition;
    void *payload;
    size_t len;
    void *key;
    size_t key_len;
    int64_t offset;
    void *private_;
} rd_kafka_message_t;

#define ERR_PARTITION_EOF (-191)

/* In the order of kafka.py's table. */
struct kafka_api {
    rd_kafka_queue_t *(*queue_get_partition)(rd_kafka_t *, const char *topic, int32_t partition);
    void (*queue_forward)(rd_kafka_queue_t *from, rd_kafka_queue_t *to);
    void (*queue_destroy)(rd_kafka_queue_t *);
    ssize_type (*consume_batch_queue)(rd_kafka_queue_t *, int timeout_ms, rd_kafka_message_t **, size_t);
    void (*message_destroy)(rd_kafka_message_t *);
    const char *(*message_errstr)(const rd_kafka_message_t *);
    int64_t (*message_timestamp)(const rd_kafka_message_t *, int *type);
    int (*message_headers)(const rd_kafka_message_t *, rd_kafka_headers_t **);
    int (*header_get_all)(const rd_kafka_headers_t *, size_t index, const char **name, const void **value, size_t *);
    const char *(*topic_name)(const rd_kafka_topic_t *);
    rd_kafka_queue_t *(*queue_get_consumer)(rd_kafka_t *);
    void (*queue_io_event_enable)(rd_kafka_queue_t *, int fd, const void *payload, size_t);
};

static struct kafka_api api;

/* ---- What Python sees; the same structures stand in kafka.py ---- */

enum { FAILED_NOT, FAILED_MEMORY, FAILED_TOO_LARGE, FAILED_STRANGER, FAILED_CONSUME };

struct result {
    int64_t taken;  /* messages, ends of partitions included */
    int64_t bytes;  /* of the records appended */
    int32_t failed; /* FAILED_… */
    int32_t error;  /* librdkafka's code of a message that is an error, or 0 */
    char text[512]; /* of the error; of a stranger: its topic */
    int32_t partition; /* of the error or the stranger */
};

struct part_state {
    int64_t rows;
    int64_t bytes;        /* keys, values, headers */
    int64_t position;     /* one past the last record seen, also beyond "until"; -1: none */
    int64_t end;          /* where the partition was said to end; -1: it was not */
    int64_t key_nulls;
    int64_t value_nulls;
    int64_t header_rows;  /* records that have headers */
    int64_t headers;      /* of all records */
    int64_t header_nulls; /* headers whose value is null */
};

struct view {
    const void *data;
    int64_t size;
};

/* The order of part_views. */
enum {
    VIEW_OFFSETS,
    VIEW_TIMESTAMPS,
    VIEW_KEYS, /* each of these takes three places: bitmap, ends, bytes */
    VIEW_VALUES = VIEW_KEYS + 3,
    VIEW_HEADER_NAMES = VIEW_VALUES + 3,
    VIEW_HEADER_VALUES = VIEW_HEADER_NAMES + 3,
    VIEW_HEADER_LISTS = VIEW_HEADER_VALUES + 3, /* two: bitmap, ends */
    VIEWS = VIEW_HEADER_LISTS + 2
};

/* ---- Growing buffers ---- */

struct buffer {
    uint8_t *data;
    int64_t size;
    int64_t room;
};

#define BUFFER_START 1024
#define CHUNK 512 /* messages popped at a time: few enough to stay in the processor's cache */
#define NAME_NOT_UTF8_MAX 64
#define DRAIN_CHUNKS 4096

static char name_not_utf8[NAME_NOT_UTF8_MAX + 1];

static int buffer_grow(struct buffer *b, int64_t more) {
    int64_t room = b->room ? b->room : BUFFER_START;
    if (more < 0 || more > INT64_MAX / 4 - b->size) return FAILED_TOO_LARGE;
    while (room < b->size + more) room *= 2;
    uint8_t *data = realloc(b->data, (size_t)room);
    if (data == NULL) return FAILED_MEMORY;
    b->data = data;
    b->room = room;
    return FAILED_NOT;
}

static inline int buffer_append(struct buffer *b, const void *bytes, int64_t count) {
    if (count > b->room - b->size) {
        int failed = buffer_grow(b, count);
        if (failed) return failed;
    }
    if (count > 0) memcpy(b->data + b->size, bytes, (size_t)count);
    b->size += count;
    return FAILED_NOT;
}

/* Appends the bit of row number "row" to a bitmap that has those of all rows before it. */
static inline int bitmap_append(struct buffer *b, int64_t row, int bit) {
    static const uint8_t zero = 0;
    if ((row & 7) == 0) {
        int failed = buffer_append(b, &zero, 1);
        if (failed) return failed;
    }
    if (bit) b->data[row >> 3] |= (uint8_t)(1u << (row & 7));
    return FAILED_NOT;
}

static inline int end_append(struct buffer *ends, int64_t end) {
    int32_t narrow = (int32_t)end;
    if (end > INT32_MAX) return FAILED_TOO_LARGE;
    return buffer_append(ends, &narrow, (int64_t)sizeof narrow);
}

/* ---- Columns of bytes ---- */

struct binary {
    struct buffer bitmap, ends, bytes;
    int64_t rows;
    int64_t nulls;
};

static inline int binary_append(struct binary *c, const void *bytes, size_t count) {
    int failed = bitmap_append(&c->bitmap, c->rows, bytes != NULL);
    if (failed) return failed;
    if (bytes == NULL) {
        c->nulls++;
    } else {
        if (count > INT32_MAX || (int64_t)count > INT32_MAX - c->bytes.size) return FAILED_TOO_LARGE;
        failed = buffer_append(&c->bytes, bytes, (int64_t)count);
        if (failed) return failed;
    }
    c->rows++;
    return end_append(&c->ends, c->bytes.size);
}

static void binary_free(struct binary *c) {
    free(c->bitmap.data);
    free(c->ends.data);
    free(c->bytes.data);
}

/* ---- Parts ---- */

struct part {
    char *topic;
    int32_t partition;
    int64_t until; /* records from here on are dropped */
    struct part_state state;
    struct buffer offsets, timestamps;
    struct binary keys, values, header_names, header_values;
    struct buffer list_bitmap, list_ends;
};

EXPORT void avow_kafka_part_free(struct part *p) {
    if (p == NULL) return;
    free(p->topic);
    free(p->offsets.data);
    free(p->timestamps.data);
    binary_free(&p->keys);
    binary_free(&p->values);
    binary_free(&p->header_names);
    binary_free(&p->header_values);
    free(p->list_bitmap.data);
    free(p->list_ends.data);
    free(p);
}

/* NULL: no memory. */
EXPORT struct part *avow_kafka_part_new(const char *topic, int32_t partition, int64_t until) {
    struct part *p = calloc(1, sizeof *p);
    if (p == NULL) return NULL;
    size_t length = strlen(topic) + 1;
    p->partition = partition;
    p->until = until;
    p->state.position = p->state.end = -1;
    p->topic = malloc(length);
    int failed = p->topic == NULL;
    if (!failed) memcpy(p->topic, topic, length);
    failed = failed || end_append(&p->keys.ends, 0) || end_append(&p->values.ends, 0) ||
             end_append(&p->header_names.ends, 0) || end_append(&p->header_values.ends, 0) ||
             end_append(&p->list_ends, 0);
    if (failed) {
        avow_kafka_part_free(p);
        return NULL;
    }
    return p;
}

EXPORT void avow_kafka_part_state(const struct part *p, struct part_state *state) {
    *state = p->state;
    state->key_nulls = p->keys.nulls;
    state->value_nulls = p->values.nulls;
    state->headers = p->header_names.rows;
    state->header_nulls = p->header_values.nulls;
}

static void view_of(struct view *v, const struct buffer *b) {
    v->data = b->data;
    v->size = b->size;
}

static void views_of(struct view *v, const struct binary *c) {
    view_of(&v[0], &c->bitmap);
    view_of(&v[1], &c->ends);
    view_of(&v[2], &c->bytes);
}

/* The buffers, good until the next take into this part, or its end. */
EXPORT void avow_kafka_part_views(const struct part *p, struct view views[VIEWS]) {
    view_of(&views[VIEW_OFFSETS], &p->offsets);
    view_of(&views[VIEW_TIMESTAMPS], &p->timestamps);
    views_of(&views[VIEW_KEYS], &p->keys);
    views_of(&views[VIEW_VALUES], &p->values);
    views_of(&views[VIEW_HEADER_NAMES], &p->header_names);
    views_of(&views[VIEW_HEADER_VALUES], &p->header_values);
    view_of(&views[VIEW_HEADER_LISTS], &p->list_bitmap);
    view_of(&views[VIEW_HEADER_LISTS + 1], &p->list_ends);
}

/* ---- Header names ---- */

/* The bytes of the UTF-8 character that s begins with; 0: it begins with none. As Python decodes: no surrogates, nothing
 * in more bytes than it needs, nothing above U+10FFFF. s ends with a NUL, which continues no character. */
static size_t utf8_step(const uint8_t *s) {
    uint8_t low = 0x80, high = 0xBF; /* of the second byte */
    size_t more;
    if (s[0] < 0x80) return 1;
    if (s[0] >= 0xC2 && s[0] <= 0xDF) {
        more = 1;
    } else if (s[0] >= 0xE0 && s[0] <= 0xEF) {
        more = 2;
        if (s[0] == 0xE0) low = 0xA0;
        if (s[0] == 0xED) high = 0x9F;
    } else if (s[0] >= 0xF0 && s[0] <= 0xF4) {
        more = 3;
        if (s[0] == 0xF0) low = 0x90;
        if (s[0] == 0xF4) high = 0x8F;
    } else {
        return 0;
    }
    if (s[1] < low || s[1] > high) return 0;
    for (size_t i = 2; i <= more; i++)
        if (s[i] < 0x80 || s[i] > 0xBF) return 0;
    return more + 1;
}

static int is_utf8(const char *text) {
    const uint8_t *s = (const uint8_t *)text;
    while (*s != 0) {
        size_t step = utf8_step(s);
        if (step == 0) return 0;
        s += step;
    }
    return 1;
}

/* For the tests, which compare it with Python's decoder. */
EXPORT int avow_kafka_is_utf8(const char *text) { return is_utf8(text); }

/* ---- Records ---- */

/* The headers of one record, and its row in the list column. No headers, or ones that librdkafka cannot parse: null. */
static int headers_append(struct part *p, const rd_kafka_message_t *m) {
    rd_kafka_headers_t *headers = NULL;
    size_t count = 0;
    if (api.message_headers(m, &headers) == 0 && headers != NULL) {
        const char *name;
        const void *value;
        size_t size;
        for (; api.header_get_all(headers, count, &name, &value, &size) == 0; count++) {
            if (!is_utf8(name)) name = name_not_utf8;
            size_t length = strlen(name);
            int failed = binary_append(&p->header_names, name, length);
            if (!failed) failed = binary_append(&p->header_values, value, value ? size : 0);
            if (failed) return failed;
            p->state.bytes += (int64_t)length + (value ? (int64_t)size : 0);
        }
    }
    if (count > 0) p->state.header_rows++;
    int failed = bitmap_append(&p->list_bitmap, p->state.rows, count > 0);
    return failed ? failed : end_append(&p->list_ends, p->header_names.rows);
}

static int record_append(struct part *p, const rd_kafka_message_t *m) {
    int type;
    int64_t timestamp = api.message_timestamp(m, &type);
    int failed = buffer_append(&p->offsets, &m->offset, (int64_t)sizeof m->offset);
    if (!failed) failed = buffer_append(&p->timestamps, &timestamp, (int64_t)sizeof timestamp);
    if (!failed) failed = binary_append(&p->keys, m->key, m->key_len);
    if (!failed) failed = binary_append(&p->values, m->payload, m->len);
    if (!failed) failed = headers_append(p, m);
    if (failed) return failed;
    p->state.bytes += (m->key ? (int64_t)m->key_len : 0) + (m->payload ? (int64_t)m->len : 0);
    p->state.rows++;
    return FAILED_NOT;
}

/* ---- Waiting ---- */

struct waiter {
    rd_kafka_queue_t *consumer; /* callbacks */
    int in, out;                /* the ends of the pipe: librdkafka writes, we read */
};

#if defined(_WIN32)
EXPORT struct waiter *avow_kafka_waiter_open(rd_kafka_t *client) { return (void)client, NULL; }
EXPORT void avow_kafka_waiter_close(struct waiter *w) { (void)w; }
EXPORT void avow_kafka_wait(const struct waiter *w, int32_t wait_ms) { (void)w, (void)wait_ms; }
#else

/* Writes must not block librdkafka's threads, nor reads ours; no child may have it. */
static int pipe_open(struct waiter *w) {
    int ends[2];
    if (pipe(ends) != 0) return -1;
    for (int i = 0; i < 2; i++)
        if (fcntl(ends[i], F_SETFL, O_NONBLOCK) != 0 || fcntl(ends[i], F_SETFD, FD_CLOEXEC) != 0) {
            close(ends[0]);
            close(ends[1]);
            return -1;
        }
    w->out = ends[0];
    w->in = ends[1];
    return 0;
}

/* NULL: no memory, no file left, or the client is no consumer. */
EXPORT struct waiter *avow_kafka_waiter_open(rd_kafka_t *client) {
    struct waiter *w = calloc(1, sizeof *w);
    if (w == NULL) return NULL;
    w->consumer = api.queue_get_consumer(client);
    if (w->consumer == NULL || pipe_open(w) != 0) {
        if (w->consumer != NULL) api.queue_destroy(w->consumer);
        free(w);
        return NULL;
    }
    api.queue_io_event_enable(w->consumer, w->in, "", 1);
    return w;
}

/* To be called after its sources are closed, and before the client is. */
EXPORT void avow_kafka_waiter_close(struct waiter *w) {
    if (w == NULL) return;
    api.queue_io_event_enable(w->consumer, -1, NULL, 0);
    api.queue_destroy(w->consumer);
    close(w->in);
    close(w->out);
    free(w);
}

/* Until a queue gets something, or the time is over. It may end early. */
EXPORT void avow_kafka_wait(const struct waiter *w, int32_t wait_ms) {
    struct pollfd polled = {.fd = w->out, .events = POLLIN};
    char written[256];
    if (poll(&polled, 1, wait_ms) > 0)
        while (read(w->out, written, sizeof written) == (ssize_t)sizeof written) continue;
}
#endif

/* ---- Sources ---- */

struct source {
    rd_kafka_queue_t *queue;
    struct part *part; /* NULL: none yet */
};

static void text_set(struct result *r, const char *text) {
    size_t length = text ? strlen(text) : 0;
    if (length >= sizeof r->text) length = sizeof r->text - 1;
    if (length) memcpy(r->text, text, length);
    r->text[length] = 0;
}

/* The queue of one partition, cut off from the consumer's. To be called before the partition is assigned. The waiter may
 * be NULL. NULL: no memory, or the client is no consumer. */
EXPORT struct source *avow_kafka_source_open(rd_kafka_t *client, const char *topic, int32_t partition,
                                             const struct waiter *waiter) {
    struct source *s = calloc(1, sizeof *s);
    if (s == NULL) return NULL;
    s->queue = api.queue_get_partition(client, topic, partition);
    if (s->queue == NULL) {
        free(s);
        return NULL;
    }
    api.queue_forward(s->queue, NULL);
    if (waiter != NULL) api.queue_io_event_enable(s->queue, waiter->in, "", 1);
    return s;
}

/* Throws away what was fetched ahead. Else the queue of a partition keeps it until it is assigned again. */
static void source_drain(struct source *s) {
    rd_kafka_message_t *messages[CHUNK];
    for (int i = 0; i < DRAIN_CHUNKS; i++) {
        ssize_type count = api.consume_batch_queue(s->queue, 0, messages, CHUNK);
        for (ssize_type j = 0; j < count; j++) api.message_destroy(messages[j]);
        if (count <= 0) return;
    }
}

/* To be called after "unassign", and before the client is closed. The part is not freed. */
EXPORT void avow_kafka_source_close(struct source *s) {
    if (s == NULL) return;
    api.queue_io_event_enable(s->queue, -1, NULL, 0);
    source_drain(s);
    api.queue_destroy(s->queue);
    free(s);
}

/* Records go into this part from now on. It must stay until another one is set, or the source is closed. */
EXPORT void avow_kafka_source_set_part(struct source *s, struct part *p) { s->part = p; }

/* Whether a message is of the part's partition. "known" is the topic that was last found to be the right one. Within a
 * chunk an address is enough to know it again: its messages, and so their topics, are all still there. */
static int is_of_part(const struct part *p, const rd_kafka_message_t *m, const rd_kafka_topic_t **known) {
    if (p == NULL || m->rkt == NULL || m->partition != p->partition) return 0;
    if (m->rkt == *known) return 1;
    const char *topic = api.topic_name(m->rkt);
    if (topic == NULL || strcmp(topic, p->topic) != 0) return 0;
    *known = m->rkt;
    return 1;
}

/* One message. Whether the take goes on. */
static int message_take(struct part *p, const rd_kafka_message_t *m, const rd_kafka_topic_t **known, int ignored,
                        struct result *r) {
    if (m->err != 0 && m->err != ERR_PARTITION_EOF) {
        if (m->err == ignored) return 1;
        r->error = m->err;
        r->partition = m->partition;
        text_set(r, api.message_errstr(m));
        return 0;
    }
    if (!is_of_part(p, m, known)) {
        r->failed = FAILED_STRANGER;
        r->partition = m->partition;
        text_set(r, m->rkt ? api.topic_name(m->rkt) : NULL);
        return 0;
    }
    if (m->err == ERR_PARTITION_EOF) {
        if (m->offset > p->state.end) p->state.end = m->offset;
        return 1;
    }
    p->state.position = m->offset + 1;
    if (m->offset >= p->until) return 1;
    int64_t before = p->state.bytes;
    r->failed = record_append(p, m);
    r->bytes += p->state.bytes - before;
    return r->failed == FAILED_NOT;
}

/* All messages of a chunk are destroyed, whatever comes of them. */
static int chunk_take(const struct source *s, rd_kafka_message_t **messages, ssize_type count, int ignored,
                      struct result *r) {
    const rd_kafka_topic_t *known = NULL;
    int proceed = 1;
    for (ssize_type i = 0; i < count; i++) {
        if (proceed) proceed = message_take(s->part, messages[i], &known, ignored, r);
        api.message_destroy(messages[i]);
    }
    return proceed;
}

/* What is at hand of one source, until "most" messages or "most_bytes" bytes are taken. */
static void source_take(const struct source *s, int64_t most, int64_t most_bytes, int ignored, struct result *r) {
    rd_kafka_message_t *messages[CHUNK];
    r->taken = r->bytes = 0;
    while (r->taken < most && r->bytes < most_bytes) {
        int64_t want = most - r->taken < CHUNK ? most - r->taken : CHUNK;
        ssize_type count = api.consume_batch_queue(s->queue, 0, messages, (size_t)want);
        if (count < 0) r->failed = FAILED_CONSUME;
        if (count <= 0) return;
        r->taken += count;
        if (!chunk_take(s, messages, count, ignored, r)) return;
    }
}

/*
 * What is at hand, without waiting, beginning with source number "first", until "most" messages or "most_bytes" bytes
 * are taken of all together. How many messages each has given is left in "taken". Messages with the error code "ignored"
 * are passed over (0: none). Zero is returned if nothing failed.
 */
EXPORT int avow_kafka_sources_take(struct source *const *sources, int32_t count, int32_t first, int64_t most,
                                   int64_t most_bytes, int32_t ignored, int64_t *taken, struct result *r) {
    int64_t all = 0, bytes = 0;
    memset(r, 0, sizeof *r);
    memset(taken, 0, (size_t)count * sizeof *taken);
    for (int32_t i = 0; i < count && all < most && bytes < most_bytes; i++) {
        int32_t at = (first + i) % count;
        source_take(sources[at], most - all, most_bytes - bytes, ignored, r);
        taken[at] = r->taken;
        all += r->taken;
        bytes += r->bytes;
        if (r->failed != FAILED_NOT || r->error != 0) return 1;
    }
    return 0;
}

/*
 * The functions to call, and the name that a header gets whose own is not UTF-8. The sizes are those of kafka.py's
 * structures: zero is returned if they are ours.
 */
EXPORT int avow_kafka_setup(const struct kafka_api *functions, const char *not_utf8, const int64_t sizes[4]) {
    if (sizes[0] != (int64_t)sizeof(struct kafka_api) || sizes[1] != (int64_t)sizeof(struct result) ||
        sizes[2] != (int64_t)sizeof(struct part_state) || sizes[3] != (int64_t)(VIEWS * sizeof(struct view)))
        return -1;
    if (!is_complete(functions, sizeof *functions)) return -2;
    if (strlen(not_utf8) > NAME_NOT_UTF8_MAX || !is_utf8(not_utf8)) return -3;
    api = *functions;
    strcpy(name_not_utf8, not_utf8);
    return 0;
}
