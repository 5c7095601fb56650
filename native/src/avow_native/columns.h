/* Arrow columns that grow value by value: what every decoder of records writes into, driven by the declared columns.
 *
 * The contract of a decoder. A record is read only if it is beyond doubt; any other record is named in the list of
 * doubtful rows, and the caller gives it to its strict reader, written in Python, which has the last word and knows the
 * reasons. So a decoder never refuses a record and never explains: it may doubt whatever it likes, and that only costs
 * time. What it must never do is read a record that the strict reader refuses, or read another value.
 *
 * The columns are a tree: a record is a struct. When a record is doubtful, all columns are cut back to the number of
 * good rows, so that doubtful records leave nothing behind and the rows that come out are exactly the others, in order.
 *
 * Bounds. Every write is checked against the capacity of its column (`reserve`, `reserve_text`), and text against 32-bit
 * offsets. Nothing here keeps state between calls: all of it may run in many threads.
 */
#ifndef AVOW_COLUMNS_H
#define AVOW_COLUMNS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

#ifndef __SIZEOF_INT128__
#error "avow-native needs 128-bit integers: a 64-bit machine, and gcc or clang"
#endif

__extension__ typedef unsigned __int128 uint128;

enum {
    SCHEMA_DEPTH_MAX = 128,
    DIGITS_MAX = 38, /* of a decimal */
    FIRST_CAPACITY = 64,
    SLACK = 8, /* text is copied by 8 bytes */
};

enum { NO_MEMORY = -1, BAD_ARGUMENT = -2 };

/* The same numbers as in columns.py. */
enum kind {
    BOOLEAN = 0,
    INT8 = 1,
    INT16 = 2,
    INT32 = 3,
    INT64 = 4,
    FLOAT = 5,
    DOUBLE = 6,
    DECIMAL = 7,
    STRING = 8,
    BINARY = 9,
    DATE = 10,
    TIMESTAMP = 11,
    TIMESTAMP_NTZ = 12,
    LIST = 13,   /* one child: the element */
    MAP = 14,    /* one child: a struct of a string, the key, and the value */
    STRUCT = 15,
    KINDS = 16,
};

/* One node of the schema. Nodes stand in an array, each followed by its children; the first is the record itself. */
struct avow_field {
    const char *name; /* not terminated */
    int32_t name_length;
    int32_t kind;
    int32_t required;
    int32_t precision;
    int32_t scale;
    int32_t child_count;
};

struct bytes {
    uint8_t *start;
    int64_t length;
    int64_t capacity;
};

struct column {
    const struct avow_field *field;
    int64_t length;
    int64_t capacity;
    uint8_t *validity; /* absent while no value is null */
    uint8_t *values;   /* of a fixed width, or bits */
    int32_t *offsets;  /* of strings, binaries, lists and maps */
    struct bytes text; /* of strings and binaries */
    struct column *children;
};

/* Reads the record between `start` and `end` into one more row of `record`, or says that it is doubtful; `*no_memory`
 * says that memory was the reason. */
typedef bool read_row(void *reader, const uint8_t *start, const uint8_t *end, struct column *record);

/* Values of an Arrow binary array, none of them null. */
struct values {
    const uint8_t *data;
    int64_t data_length;
    const int32_t *offsets;
    int64_t rows;
};

bool avow_set_capacity(struct column *column, int64_t capacity);
bool avow_append_null(bool *no_memory, struct column *column);
void avow_truncate_column(struct column *column, int64_t length);
int64_t avow_read_rows(const struct avow_field *fields, int64_t field_count, const struct values *values,
                       read_row *read, void *reader, const bool *no_memory, int64_t *doubtful, struct ArrowArray *out);

static inline int64_t width_of(enum kind kind) {
    static const uint8_t widths[KINDS] = {
        [INT8] = 1,     [INT16] = 2, [INT32] = 4,     [INT64] = 8,         [FLOAT] = 4, [DOUBLE] = 8,
        [DECIMAL] = 16, [DATE] = 4,  [TIMESTAMP] = 8, [TIMESTAMP_NTZ] = 8,
    };
    return widths[kind];
}

static inline enum kind kind_of(const struct column *column) { return (enum kind)column->field->kind; }

static inline bool has_values(enum kind kind) { return kind == BOOLEAN || width_of(kind) > 0; }

static inline bool has_text(enum kind kind) { return kind == STRING || kind == BINARY; }

static inline bool has_offsets(enum kind kind) { return has_text(kind) || kind == LIST || kind == MAP; }

static inline bool resize(void **memory, int64_t size) {
    void *moved = realloc(*memory, (size_t)(size > 0 ? size : 1));
    if (moved == NULL) return false;
    *memory = moved;
    return true;
}

static inline bool reserve(bool *no_memory, struct column *column) {
    if (column->length < column->capacity) return true;
    int64_t doubled = column->capacity < FIRST_CAPACITY ? FIRST_CAPACITY : column->capacity * 2;
    if (avow_set_capacity(column, doubled)) return true;
    *no_memory = true;
    return false;
}

static inline bool reserve_text(bool *no_memory, struct bytes *text, int64_t more) {
    int64_t needed = text->length + more + SLACK;
    if (needed <= text->capacity) return true;
    if (needed > INT32_MAX) { /* no offset could say where it ends */
        *no_memory = true;
        return false;
    }
    int64_t capacity = needed < text->capacity * 2 ? text->capacity * 2 : needed;
    if (!resize((void **)&text->start, capacity)) {
        *no_memory = true;
        return false;
    }
    text->capacity = capacity;
    return true;
}

/* Sets a bit and clears those behind it, which are set later. So nothing is left of a doubtful row that was cut off. */
static inline void set_last_bit(uint8_t *bits, int64_t index, bool value) {
    unsigned bit = 1u << (index & 7);
    bits[index >> 3] = (uint8_t)((bits[index >> 3] & (bit - 1)) | (value ? bit : 0));
}

/* The value that was written at the end is one more, not null. */
static inline void append(struct column *column) {
    if (column->validity != NULL) set_last_bit(column->validity, column->length, true);
    column->length++;
}

/* The length of the character that begins here, not ASCII, or 0 if this is not UTF-8. RFC 3629, section 4. */
static inline int utf8_length(const uint8_t *at, const uint8_t *end) {
    uint8_t first = at[0], low = 0x80, high = 0xbf;
    int length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    if (first < 0xc2 || first > 0xf4 || end - at < length) return 0;
    if (first == 0xe0) low = 0xa0;
    if (first == 0xed) high = 0x9f;
    if (first == 0xf0) low = 0x90;
    if (first == 0xf4) high = 0x8f;
    if (at[1] < low || at[1] > high) return 0;
    for (int index = 2; index < length; index++)
        if (at[index] < 0x80 || at[index] > 0xbf) return 0;
    return length;
}

/* A value of a fixed width, and text that was checked, into columns with room for one more. */
static inline void put(struct column *column, const void *value, size_t width) {
    memcpy(column->values + (size_t)column->length * width, value, width);
    append(column);
}

static inline bool put_text(bool *no_memory, const uint8_t *start, int64_t length, struct column *column) {
    struct bytes *text = &column->text;
    if (!reserve_text(no_memory, text, length)) return false;
    if (length > 0) memcpy(text->start + text->length, start, (size_t)length);
    text->length += length;
    column->offsets[column->length + 1] = (int32_t)text->length;
    append(column);
    return true;
}

/* Whether this is UTF-8, and without NUL if that is refused. */
static inline bool is_text(const uint8_t *at, const uint8_t *end, bool refuse_nul) {
    const uint64_t ones = UINT64_C(0x0101010101010101), tops = ones << 7;
    while (at < end) {
        while (end - at >= 8) {
            uint64_t word;
            memcpy(&word, at, sizeof word);
            /* A borrow marks a byte by mistake only behind one that is NUL: what is plain is plain. */
            if ((word & tops) != 0 || (refuse_nul && ((word - ones) & ~word & tops) != 0)) break;
            at += 8;
        }
        if (at == end) break;
        if (*at < 0x80) {
            if (*at == 0 && refuse_nul) return false;
            at++;
        } else {
            int length = utf8_length(at, end);
            if (length == 0) return false;
            at += length;
        }
    }
    return true;
}

enum { FIVES_MAX = 27 };

static const uint64_t FIVES[FIVES_MAX + 1] = { /* 5^0 to 5^27, the last that fits */
    UINT64_C(1), UINT64_C(5), UINT64_C(25), UINT64_C(125), UINT64_C(625), UINT64_C(3125), UINT64_C(15625),
    UINT64_C(78125), UINT64_C(390625), UINT64_C(1953125), UINT64_C(9765625), UINT64_C(48828125), UINT64_C(244140625),
    UINT64_C(1220703125), UINT64_C(6103515625), UINT64_C(30517578125), UINT64_C(152587890625),
    UINT64_C(762939453125), UINT64_C(3814697265625), UINT64_C(19073486328125), UINT64_C(95367431640625),
    UINT64_C(476837158203125), UINT64_C(2384185791015625), UINT64_C(11920928955078125), UINT64_C(59604644775390625),
    UINT64_C(298023223876953125), UINT64_C(1490116119384765625), UINT64_C(7450580596923828125),
};

static inline uint128 power_of_ten(int32_t exponent) { /* at most DIGITS_MAX */
    int32_t low = exponent < FIVES_MAX ? exponent : FIVES_MAX;
    return ((uint128)FIVES[low] * FIVES[exponent - low]) << exponent;
}

#endif
