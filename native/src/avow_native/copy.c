/* Arrow columns as PostgreSQL's binary COPY data.
 *
 * Theory of operation
 * -------------------
 * The format (https://www.postgresql.org/docs/current/sql-copy.html, "Binary Format") is a header of 19 bytes, then one
 * tuple per row, then a trailer of two bytes. A tuple is the number of its fields (16 bits), then each field as its
 * length (32 bits; -1 is null) and as many bytes, in the form that the receive function of the column's type reads. All
 * numbers are big-endian.
 *
 * Arrow has columns and COPY wants rows, so one pass goes over the rows and, in each, over the columns. What it reads
 * are Arrow's own buffers, at the array's offset, so a slice costs nothing. What it writes goes into a buffer of the
 * caller's, which need not hold everything: `avow_copy_encode` fills it, and goes on in the next call where it stopped.
 * Where it stopped is in `struct avow_copy`. It stops only between fields, or within the bytes of a text: before each
 * field it makes sure that FIELD_MAX bytes are left, which is more than any field but a text takes. So memory is bounded
 * by the caller's buffer, however long a text is, and no write is ever past its end.
 *
 * What cannot be said is an error with its row and column, and never other bytes. Only two kinds are decided here; all
 * else (ranges, encodings, NUL, lengths) PostgreSQL's receive functions check, and they name row and column too.
 *   - Timestamps and dates count from 2000 in PostgreSQL and from 1970 in Arrow. The lowest ones have no number there,
 *     and the lowest number of all means -infinity.
 *   - Offsets of a text column that point outside of its data: the column is broken.
 *
 * numeric is a sign, digits of base 10000, the power of the first of them (`weight`) and the number of decimal places
 * (`dscale`). Arrow's decimal128 is a whole number, times 10 to the minus `scale`. Digits of base 10000 must meet at the
 * decimal point, so the lowest one takes scale % 4 decimal digits, if that is not 0, and each other one takes four.
 *
 * Owns: this format. Knows nothing of Python, connections or tables. No allocation, no global state: calls on different
 * states may run at once. The twin in Python, which tests compare byte by byte, is avow.sinks.postgres.copy_format.
 */

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Arrow's buffers are little-endian here, and numbers are swapped without asking"
#endif

__extension__ typedef unsigned __int128 uint128;

enum avow_copy_type { /* as in copy.py */
    COPY_NULL = 0,      /* a column of nulls, without buffers */
    COPY_BOOLEAN = 1,   /* bits */
    COPY_INT8 = 2,      /* as smallint */
    COPY_FIXED2 = 3,    /* smallint */
    COPY_FIXED4 = 4,    /* integer, real */
    COPY_FIXED8 = 5,    /* bigint, double precision */
    COPY_DATE = 6,      /* days */
    COPY_TIMESTAMP = 7, /* microseconds */
    COPY_NUMERIC = 8,   /* decimal128 */
    COPY_BYTES = 9,     /* text, bytea */
    COPY_JSONB = 10     /* JSON text */
};

enum avow_copy_error {
    COPY_OUT_OF_RANGE = -1, /* a date or timestamp that PostgreSQL's type cannot hold */
    COPY_BROKEN = -2,       /* offsets outside of the data */
    COPY_MISUSED = -3       /* a buffer that is too small, an unknown type */
};

struct avow_copy_column {
    int32_t type;
    int32_t scale;           /* of a decimal */
    int64_t offset;          /* of the array in its buffers */
    const uint8_t *validity; /* bits, or NULL: no value is null */
    const uint8_t *values;   /* of fixed width, or the bytes of a text column */
    const uint8_t *ends;     /* int32 offsets of a text column */
    int64_t size;            /* of `values` in bytes */
};

struct avow_copy {
    int64_t rows;
    int64_t row;     /* the next one; of an error, the one it is about */
    int64_t sent;    /* bytes of the text in `column` that are already out; 0: the field is not begun */
    int32_t columns;
    int32_t column;  /* the next field of that row */
    int32_t started; /* the header is out */
    int32_t ended;   /* the trailer is out */
};

enum {
    FIELD_MAX = 64,
    COLUMNS_MAX = 1664,
    GROUP = 10000,
    GROUPS_MAX = 11, /* base 10000 digits of a 128-bit number, the lowest one perhaps not whole */
    NUMERIC_POSITIVE = 0,
    NUMERIC_NEGATIVE = 0x4000,
    JSONB_VERSION = 1
};

static const uint8_t HEADER[19] = "PGCOPY\n\377\r\n\0\0\0\0\0\0\0\0"; /* signature, flags, length of an extension */
static const int64_t EPOCH_US = 946684800000000; /* from 1970 to 2000 */
static const int32_t EPOCH_DAYS = 10957;
static const uint32_t POWERS[] = {1, 10, 100, 1000};

static uint8_t *put16(uint8_t *out, uint16_t value) {
    out[0] = (uint8_t)(value >> 8);
    out[1] = (uint8_t)value;
    return out + 2;
}

static uint8_t *put32(uint8_t *out, uint32_t value) {
    value = __builtin_bswap32(value);
    memcpy(out, &value, sizeof value);
    return out + 4;
}

static uint8_t *put64(uint8_t *out, uint64_t value) {
    value = __builtin_bswap64(value);
    memcpy(out, &value, sizeof value);
    return out + 8;
}

/* Buffers need not be aligned: memcpy, which compiles to one load. */
static int16_t get16(const uint8_t *values, int64_t at) {
    int16_t value;
    memcpy(&value, values + at * 2, sizeof value);
    return value;
}

static int32_t get32(const uint8_t *values, int64_t at) {
    int32_t value;
    memcpy(&value, values + at * 4, sizeof value);
    return value;
}

static int64_t get64(const uint8_t *values, int64_t at) {
    int64_t value;
    memcpy(&value, values + at * 8, sizeof value);
    return value;
}

static bool bit(const uint8_t *bits, int64_t at) { return bits[at >> 3] >> (at & 7) & 1; }

/* The base 10000 digits of a number, lowest first. How many there are, without zeros at the top. */
static int split_groups(uint128 rest, int32_t scale, uint16_t *groups) {
    int count = 0;
    if (scale % 4 != 0 && rest != 0) {
        uint32_t part = POWERS[scale % 4];
        groups[count++] = (uint16_t)((uint32_t)(rest % part) * POWERS[4 - scale % 4]);
        rest /= part;
    }
    while (rest >> 64) {
        groups[count++] = (uint16_t)(rest % GROUP);
        rest /= GROUP;
    }
    for (uint64_t small = (uint64_t)rest; small != 0; small /= GROUP)
        groups[count++] = (uint16_t)(small % GROUP);
    return count;
}

static uint8_t *put_numeric(uint8_t *out, const uint8_t *values, int64_t at, int32_t scale) {
    uint128 number;
    uint16_t groups[GROUPS_MAX + 1];
    memcpy(&number, values + at * 16, sizeof number);
    bool negative = (number >> 127) != 0;
    if (negative)
        number = -number;
    int top = split_groups(number, scale, groups), bottom = 0;
    while (bottom < top && groups[bottom] == 0)
        bottom++;
    int count = top - bottom, fraction = (scale + 3) / 4;
    out = put32(out, (uint32_t)(8 + 2 * count));
    out = put16(out, (uint16_t)count);
    out = put16(out, (uint16_t)(count == 0 ? 0 : top - 1 - fraction));
    out = put16(out, negative ? NUMERIC_NEGATIVE : NUMERIC_POSITIVE);
    out = put16(out, (uint16_t)scale);
    while (top > bottom)
        out = put16(out, groups[--top]);
    return out;
}

/* One field that is not a text. NULL: PostgreSQL's type cannot hold it. */
static uint8_t *put_fixed(uint8_t *out, const struct avow_copy_column *column, int64_t at) {
    switch (column->type) {
    case COPY_BOOLEAN:
        out = put32(out, 1);
        *out = bit(column->values, at);
        return out + 1;
    case COPY_INT8:
        return put16(put32(out, 2), (uint16_t)(int8_t)column->values[at]);
    case COPY_FIXED2:
        return put16(put32(out, 2), (uint16_t)get16(column->values, at));
    case COPY_FIXED4:
        return put32(put32(out, 4), (uint32_t)get32(column->values, at));
    case COPY_FIXED8:
        return put64(put32(out, 8), (uint64_t)get64(column->values, at));
    case COPY_DATE: {
        int32_t days = get32(column->values, at);
        return days > INT32_MIN + EPOCH_DAYS ? put32(put32(out, 4), (uint32_t)(days - EPOCH_DAYS)) : NULL;
    }
    case COPY_TIMESTAMP: {
        int64_t us = get64(column->values, at);
        return us > INT64_MIN + EPOCH_US ? put64(put32(out, 8), (uint64_t)(us - EPOCH_US)) : NULL;
    }
    default:
        return put_numeric(out, column->values, at, column->scale);
    }
}

static bool is_text(const struct avow_copy_column *column) {
    return column->type == COPY_BYTES || column->type == COPY_JSONB;
}

/* As much as there is room for of a text, from byte `copy->sent` of it; `sent` is 0 again when all of it is out. */
static uint8_t *put_text(uint8_t *out, const uint8_t *end, struct avow_copy *copy,
                         const struct avow_copy_column *column, int64_t start, int64_t length) {
    int64_t part = length - copy->sent < end - out ? length - copy->sent : end - out;
    if (part > 0) /* of no bytes the address may be NULL, which memcpy must not get */
        memcpy(out, column->values + start + copy->sent, (size_t)part);
    copy->sent = copy->sent + part < length ? copy->sent + part : 0;
    return out + part;
}

static bool is_sound(const struct avow_copy *copy, const struct avow_copy_column *columns) {
    if (copy->rows < 0 || copy->columns < 1 || copy->columns > COLUMNS_MAX)
        return false;
    for (int32_t at = 0; at < copy->columns; at++)
        if (columns[at].type < COPY_NULL || columns[at].type > COPY_JSONB || columns[at].offset < 0 ||
            columns[at].scale < 0 || columns[at].scale > 38)
            return false;
    return true;
}

/* Fill `out`. Gives how many bytes, 0 when all is out, or an error, which is about `copy->row` and `copy->column`. */
int64_t avow_copy_encode(struct avow_copy *copy, const struct avow_copy_column *columns, uint8_t *out, int64_t size) {
    uint8_t *const first = out, *const end = out + size;
    if (size < FIELD_MAX || !is_sound(copy, columns))
        return COPY_MISUSED;
    if (!copy->started) {
        memcpy(out, HEADER, sizeof HEADER);
        out += sizeof HEADER;
        copy->started = 1;
    }
    for (; copy->row < copy->rows; copy->row++, copy->column = 0) {
        for (; copy->column < copy->columns; copy->column++) {
            const struct avow_copy_column *column = &columns[copy->column];
            int64_t at = column->offset + copy->row;
            if (end - out < FIELD_MAX)
                return out - first;
            if (copy->sent == 0 && copy->column == 0)
                out = put16(out, (uint16_t)copy->columns);
            if (column->type == COPY_NULL || (column->validity != NULL && !bit(column->validity, at))) {
                out = put32(out, UINT32_MAX);
                continue;
            }
            if (is_text(column)) {
                int32_t start = get32(column->ends, at), until = get32(column->ends, at + 1);
                bool jsonb = column->type == COPY_JSONB;
                if (start < 0 || until < start || until > column->size || (jsonb && until - start == INT32_MAX))
                    return COPY_BROKEN;
                if (copy->sent == 0) {
                    out = put32(out, (uint32_t)(until - start) + jsonb);
                    if (jsonb)
                        *out++ = JSONB_VERSION;
                }
                out = put_text(out, end, copy, column, start, until - start);
                if (copy->sent != 0)
                    return out - first;
                continue;
            }
            out = put_fixed(out, column, at);
            if (out == NULL)
                return COPY_OUT_OF_RANGE;
        }
    }
    if (!copy->ended && end - out >= 2) {
        out = put16(out, UINT16_MAX);
        copy->ended = 1;
    }
    return out - first;
}
