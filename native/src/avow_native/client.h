/* What kafka.c and produce.c share: librdkafka's public types as they use them, and how a function is exported. */
#ifndef AVOW_CLIENT_H
#define AVOW_CLIENT_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
typedef ptrdiff_t ssize_type;
#else
#include <sys/types.h>
#define EXPORT __attribute__((visibility("default")))
typedef ssize_t ssize_type;
#endif

typedef struct rd_kafka_s rd_kafka_t;
typedef struct rd_kafka_queue_s rd_kafka_queue_t;
typedef struct rd_kafka_topic_s rd_kafka_topic_t;
typedef struct rd_kafka_headers_s rd_kafka_headers_t;

/* Whether all functions of a table were found. */
static inline int is_complete(const void *table, size_t size) {
    void *const *functions = (void *const *)table;
    for (size_t i = 0; i < size / sizeof(void *); i++)
        if (functions[i] == NULL) return 0;
    return 1;
}

#endif
