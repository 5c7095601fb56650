/*
 * Arrow buffers into a producer's queue, without a Python object per record.
 *
 * Theory of operation
 * -------------------
 * As in kafka.c, the client is that of a confluent_kafka object, here a Producer: settings, transactions, polling and
 * closing stay in Python, and produce.py hands over librdkafka's functions as a table (struct produce_api).
 *
 * avow_produce gives the client one message for each row, with rd_kafka_producev, which copies key and value: nothing
 * of the columns is used after the call. It is what confluent-kafka calls too, so partitioner, limits and error codes
 * are the same. Where the queue is full, or a message is refused, it stops and says at which row: Python polls and calls
 * again, or raises.
 *
 * Messages have no opaque. confluent-kafka's delivery callback takes that as "nobody asked" and returns at once, without
 * the GIL: whoever must hear of each failed delivery cannot use this. A transaction need not: with one failed delivery
 * it cannot be committed.
 *
 * Headers of a row are those of its list and then, if there is a name for it, one that says where the record came from:
 * a text that is the same for all rows, and the row's number.
 *
 * Threads: as many as there are producers. produce_setup is called once, before anything else.
 */
#include <string.h>

#include "client.h"

/* ---- librdkafka's public ABI, as far as it is used: see client.h ---- */

enum { V_END = 0, V_RKT = 2, V_PARTITION = 3, V_VALUE = 4, V_KEY = 5, V_MSGFLAGS = 7, V_TIMESTAMP = 8, V_HEADERS = 10 };

#define MSG_F_COPY 2
#define PARTITION_BY_KEY (-1)
#define ERR_INVALID_ARG (-186)

/* In the order of produce.py's table. */
struct produce_api {
    int (*producev)(rd_kafka_t *, ...);
    rd_kafka_topic_t *(*topic_new)(rd_kafka_t *, const char *name, void *conf);
    void (*topic_destroy)(rd_kafka_topic_t *);
    rd_kafka_headers_t *(*headers_new)(size_t initial_count);
    int (*header_add)(rd_kafka_headers_t *, const char *name, ssize_type, const void *value, ssize_type);
    void (*headers_destroy)(rd_kafka_headers_t *);
};

static struct produce_api api;

/* ---- What Python gives; the same structures stand in produce.py ---- */

/* An Arrow column of bytes, text or lists (which have no data). Row 0 is the one that stands at "first". */
struct column {
    const uint8_t *bitmap; /* NULL: nothing is null */
    const int32_t *ends;
    const uint8_t *data;
    int64_t first;
};

struct records {
    int64_t rows;
    struct column keys, values;
    struct column headers; /* without ends: no record has any */
    struct column header_names, header_values;
    const int64_t *timestamps; /* 0: now */
    const int32_t *routes;     /* of each row: which topic; -1: the row is passed over */
    const char *const *topics;
    const int32_t *unkeyed;     /* of each topic: the partition of records without a key */
    const char *origin_name;    /* NULL: there is no such header */
    const char *origin;         /* the text before the number */
    const int64_t *origin_rows; /* the numbers, from 0 on */
};

#define ORIGIN_MAX 512

/* ---- Columns ---- */

struct bytes {
    const void *data; /* NULL: null */
    size_t size;
};

static inline int is_null(const struct column *c, int64_t row) {
    int64_t at = c->first + row;
    return c->bitmap != NULL && !(c->bitmap[at >> 3] >> (at & 7) & 1);
}

static inline struct bytes bytes_at(const struct column *c, int64_t row) {
    struct bytes bytes = {NULL, 0};
    if (is_null(c, row)) return bytes;
    const int32_t *ends = c->ends + c->first + row;
    bytes.size = (size_t)(ends[1] - ends[0]);
    bytes.data = bytes.size > 0 ? c->data + ends[0] : (const void *)""; /* empty is not null */
    return bytes;
}

/* ---- Records ---- */

/* The bytes of a name: a NUL ends it, as in Python's client. */
static size_t name_size(const struct bytes *name) {
    const void *nul = memchr(name->data, 0, name->size);
    return nul ? (size_t)((const char *)nul - (const char *)name->data) : name->size;
}

static int headers_add(rd_kafka_headers_t *headers, const struct records *r, int64_t row) {
    if (r->headers.ends == NULL || is_null(&r->headers, row)) return 0;
    const int32_t *ends = r->headers.ends + r->headers.first + row;
    int error = 0;
    for (int32_t i = ends[0]; i < ends[1] && !error; i++) {
        struct bytes name = bytes_at(&r->header_names, i), value = bytes_at(&r->header_values, i);
        error = api.header_add(headers, name.data, (ssize_type)name_size(&name), value.data, (ssize_type)value.size);
    }
    return error;
}

/* Not by snprintf, which takes as long as all the rest. The number is written from its last digit to its first. */
static int origin_add(rd_kafka_headers_t *headers, const struct records *r, int64_t row) {
    char text[ORIGIN_MAX];
    size_t start = sizeof text;
    if (r->origin_name == NULL) return 0;
    uint64_t number = (uint64_t)r->origin_rows[row];
    do
        text[--start] = (char)('0' + number % 10);
    while ((number /= 10) > 0);
    size_t before = strlen(r->origin);
    if (before > start) return ERR_INVALID_ARG;
    start -= before;
    memcpy(text + start, r->origin, before);
    return api.header_add(headers, r->origin_name, -1, text + start, (ssize_type)(sizeof text - start));
}

/* One message. Zero or librdkafka's error. */
static int record_produce(rd_kafka_t *client, rd_kafka_topic_t *topic, const struct records *r, int64_t row) {
    struct bytes key = bytes_at(&r->keys, row), value = bytes_at(&r->values, row);
    int partition = key.data != NULL ? PARTITION_BY_KEY : (int)r->unkeyed[r->routes[row]];
    rd_kafka_headers_t *headers = NULL;
    int error = 0;
    if (r->headers.ends != NULL || r->origin_name != NULL) {
        headers = api.headers_new(8);
        error = headers_add(headers, r, row);
        if (!error) error = origin_add(headers, r, row);
    }
    if (!error)
        error = api.producev(client, V_RKT, topic, V_PARTITION, partition, V_MSGFLAGS, MSG_F_COPY, V_VALUE, value.data,
                             value.size, V_KEY, key.data, key.size, V_TIMESTAMP, r->timestamps[row], V_HEADERS,
                             headers, V_END);
    if (error && headers != NULL) api.headers_destroy(headers); /* else they are the message's */
    return error;
}

/* Messages of the rows from this one on. The row that it got to is returned: all of them, or the one whose "error",
 * which is librdkafka's, is not zero. */
EXPORT int64_t avow_produce(rd_kafka_t *client, const struct records *r, int64_t row, int32_t *error) {
    rd_kafka_topic_t *topic = NULL;
    int32_t opened = -1; /* the route whose topic it is */
    for (*error = 0; row < r->rows; row++) {
        int32_t route = r->routes[row];
        if (route < 0) continue;
        if (route != opened) {
            if (topic != NULL) api.topic_destroy(topic);
            topic = api.topic_new(client, r->topics[route], NULL);
            opened = route;
        }
        *error = topic != NULL ? record_produce(client, topic, r, row) : ERR_INVALID_ARG;
        if (*error) break;
    }
    if (topic != NULL) api.topic_destroy(topic);
    return row;
}

/* The functions to call. The sizes are those of produce.py's structures: zero is returned if they are ours. */
EXPORT int avow_produce_setup(const struct produce_api *functions, const int64_t sizes[2]) {
    if (sizes[0] != (int64_t)sizeof(struct produce_api) || sizes[1] != (int64_t)sizeof(struct records)) return -1;
    if (!is_complete(functions, sizeof *functions)) return -2;
    api = *functions;
    return 0;
}
