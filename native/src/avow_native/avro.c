/* Avro records into Arrow columns, by the steps in which a writer's schema is read as the reader's.
 *
 * The contract is that of every decoder: see columns.h. The strict reader is avow's formats/avro/reader.py, which
 * follows the same steps (formats/avro/resolution.py) and knows the reasons.
 *
 * How it works. A step is a node; nodes name their parts by number, so that a recursive type that is skipped can name
 * itself. Each function reads one value from where it begins into the column where it belongs, or into none if it is
 * skipped, and returns the place behind it, or NULL for doubt. The fields of a record are read in the writer's order,
 * each into its own column; then the defaults of those that the writer has not, which are bytes in Avro's encoding, too,
 * and are read as if they stood in the record.
 *
 * What is checked, because the strict reader checks it: that numbers fit into their types and lengths into the record,
 * boolean bytes, branches and symbols, UTF-8 and NUL in text, decimals against their precision, dates and times against
 * the calendar, uuids, sizes of blocks, keys that occur twice, that nothing is left behind the record.
 *
 * What is left to doubt, because it is rare: numbers that a float may not hold exactly, maps with many keys, decimals of
 * more than 16 bytes, many items without bytes, deep nesting in what is skipped.
 */

#include "columns.h"

enum {
    SKIPPED_DEPTH_MAX = 32,  /* the strict reader allows 64 */
    EMPTY_ITEMS_MAX = 1000,  /* the strict reader allows 100,000 */
    MAP_KEYS_MAX = 128,
    UUID_CHARS = 36,
};

/* The same numbers as in avro.py. */
enum op {
    OP_NULL = 0,
    OP_BOOLEAN = 1,
    OP_INT = 2,
    OP_LONG = 3,
    OP_FLOAT = 4,
    OP_DOUBLE = 5,
    OP_BYTES = 6, /* also of the writer's strings: what is checked is the column's */
    OP_FIXED = 7,
    OP_DECIMAL_BYTES = 8,
    OP_DECIMAL_FIXED = 9,
    OP_DATE = 10,
    OP_TIME = 11,   /* an int or a long below `size` */
    OP_MILLIS = 12, /* timestamps */
    OP_MICROS = 13,
    OP_NANOS = 14,
    OP_UUID_TEXT = 15,
    OP_UUID_FIXED = 16,
    OP_ENUM = 17,   /* its parts are symbols */
    OP_SYMBOL = 18, /* `bytes` */
    OP_ARRAY = 19,
    OP_MAP = 20,
    OP_RECORD = 21, /* its parts go into the columns that they name; defaults come last */
    OP_UNION = 22,  /* its parts are branches */
    OP_MEMBER = 23, /* of a struct, the member number `size` */
    OP_DEFAULT = 24,
    OP_DOUBT = 25,
    OPS = 26,
};

struct avow_avro_node {
    int32_t op;
    int32_t is_int; /* the writer's number is an int, and not a long */
    int32_t column; /* in the struct of the record that it is a field of; -1: it is skipped */
    int32_t first_part;
    int32_t part_count;
    int64_t size;
    const uint8_t *bytes;
    int64_t bytes_length;
};

enum { REFUSE_NUL = 1 };

int64_t avow_avro_read(const struct avow_field *fields, int64_t field_count, const struct avow_avro_node *nodes,
                       int64_t node_count, const int32_t *parts, int64_t part_count, int32_t rules, int64_t skip,
                       const uint8_t *data, int64_t data_length, const int32_t *offsets, int64_t rows,
                       int64_t *doubtful, struct ArrowArray *out);

struct reader {
    const struct avow_avro_node *nodes;
    const int32_t *parts;
    const uint8_t *end; /* of the record, or of a default */
    int64_t skip;       /* bytes before each record */
    bool refuse_nul;
    bool no_memory;
};

static const uint8_t *read_value(struct reader *reader, const struct avow_avro_node *node, const uint8_t *at,
                                 struct column *column, int depth);

static inline const struct avow_avro_node *part_of(const struct reader *reader, const struct avow_avro_node *node,
                                                   int64_t number) {
    return &reader->nodes[reader->parts[node->first_part + number]];
}

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

static inline const uint8_t *read_long(const uint8_t *at, const uint8_t *end, int64_t *value) {
    uint64_t number = 0;
    for (int shift = 0; shift < 64 && at < end; shift += 7) {
        uint8_t byte = *at++;
        if (shift == 63 && byte > 1) return NULL;
        number |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            *value = (int64_t)(number >> 1) ^ -(int64_t)(number & 1);
            return at;
        }
    }
    return NULL;
}

static inline const uint8_t *read_number(const struct avow_avro_node *node, const uint8_t *at, const uint8_t *end,
                                         int64_t *value) {
    const uint8_t *behind = read_long(at, end, value);
    if (behind == NULL || !node->is_int) return behind;
    return behind - at > 5 || *value < INT32_MIN || *value > INT32_MAX ? NULL : behind;
}

/* A whole number into a column of any number: of floats only one that all near it are held by, too. */
static bool put_number(struct column *column, int64_t value) {
    double wide = (double)value;
    float narrow = (float)value;
    int32_t half = (int32_t)value;
    switch (kind_of(column)) {
    case INT32: put(column, &half, 4); return value == half;
    case INT64: put(column, &value, 8); return true;
    case FLOAT: put(column, &narrow, 4); return value >= -(1 << 24) && value <= 1 << 24;
    case DOUBLE: put(column, &wide, 8); return value >= -(INT64_C(1) << 53) && value <= INT64_C(1) << 53;
    default: return false;
    }
}

static const uint8_t *read_float(const uint8_t *at, const uint8_t *end, struct column *column) {
    if (end - at < 4) return NULL;
    float value;
    uint32_t bits = (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
    memcpy(&value, &bits, 4);
    if (column == NULL) return at + 4;
    double wide = value;
    switch (kind_of(column)) {
    case FLOAT: put(column, &value, 4); return at + 4;
    case DOUBLE: put(column, &wide, 8); return at + 4;
    default: return NULL;
    }
}

static const uint8_t *read_double(const uint8_t *at, const uint8_t *end, struct column *column) {
    if (end - at < 8) return NULL;
    if (column == NULL) return at + 8;
    if (kind_of(column) != DOUBLE) return NULL;
    uint64_t bits = 0;
    for (int byte = 0; byte < 8; byte++) bits |= (uint64_t)at[byte] << (8 * byte);
    put(column, &bits, 8);
    return at + 8;
}

static bool put_decimal(const uint8_t *at, int64_t length, struct column *column) {
    if (kind_of(column) != DECIMAL || length < 1 || length > 16) return false;
    uint128 units = at[0] & 0x80 ? ~(uint128)0 : 0;
    for (int64_t index = 0; index < length; index++) units = units << 8 | at[index];
    bool negative = units >> 127;
    if ((negative ? 0 - units : units) >= power_of_ten(column->field->precision)) return false;
    put(column, &units, 16);
    return true;
}

/* ---- dates and times -------------------------------------------------------------------------------------------- */

static const int64_t FIRST_DAY = -719162, LAST_DAY = 2932896, MICROS_IN_DAY = INT64_C(86400000000);

static bool put_date(struct column *column, int64_t days) {
    int32_t day = (int32_t)days;
    if (kind_of(column) != DATE || days < FIRST_DAY || days > LAST_DAY) return false;
    put(column, &day, 4);
    return true;
}

static bool put_moment(struct column *column, enum op unit, int64_t value) {
    const int64_t first = FIRST_DAY * MICROS_IN_DAY, last = (LAST_DAY + 1) * MICROS_IN_DAY - 1;
    if (kind_of(column) != TIMESTAMP && kind_of(column) != TIMESTAMP_NTZ) return false;
    if (unit == OP_NANOS && value % 1000 != 0) return false;
    if (unit == OP_MILLIS && (value < first / 1000 || value > last / 1000)) return false;
    int64_t micros = unit == OP_MILLIS ? value * 1000 : unit == OP_NANOS ? value / 1000 : value;
    if (micros < first || micros > last) return false;
    put(column, &micros, 8);
    return true;
}

/* ---- text ------------------------------------------------------------------------------------------------------- */

static bool put_bytes(struct reader *reader, const uint8_t *at, int64_t length, struct column *column) {
    if (kind_of(column) != STRING && kind_of(column) != BINARY) return false;
    if (kind_of(column) == STRING && !is_text(at, at + length, reader->refuse_nul)) return false;
    return put_text(&reader->no_memory, at, length, column);
}

/* A length, and that so many bytes are there. */
static const uint8_t *read_length(const uint8_t *at, const uint8_t *end, int64_t *length) {
    at = read_long(at, end, length);
    return at == NULL || *length < 0 || *length > end - at ? NULL : at;
}

static bool is_hex(uint8_t byte) {
    uint8_t letter = byte | 0x20;
    return (byte >= '0' && byte <= '9') || (letter >= 'a' && letter <= 'f');
}

static bool is_uuid(const uint8_t *at, int64_t length) {
    if (length != UUID_CHARS) return false;
    for (int index = 0; index < UUID_CHARS; index++) {
        bool is_dash = index == 8 || index == 13 || index == 18 || index == 23;
        if (is_dash ? at[index] != '-' : !is_hex(at[index])) return false;
    }
    return true;
}

static bool put_uuid(struct reader *reader, const uint8_t *at, struct column *column) {
    static const char digits[] = "0123456789abcdef";
    uint8_t text[UUID_CHARS], *to = text;
    for (int index = 0; index < 16; index++) {
        if (index == 4 || index == 6 || index == 8 || index == 10) *to++ = '-';
        *to++ = (uint8_t)digits[at[index] >> 4];
        *to++ = (uint8_t)digits[at[index] & 15];
    }
    return put_bytes(reader, text, UUID_CHARS, column);
}

/* ---- parts ------------------------------------------------------------------------------------------------------ */

/* A record's key: whether it is among those of its map. */
static bool has_key(const struct column *keys, int64_t first, int64_t last) {
    const uint8_t *text = keys->text.start;
    int64_t start = keys->offsets[last], length = keys->offsets[last + 1] - start;
    for (int64_t key = first; key < last; key++) {
        if (keys->offsets[key + 1] - keys->offsets[key] != length) continue;
        if (memcmp(text + keys->offsets[key], text + start, (size_t)length) == 0) return true;
    }
    return false;
}

static const uint8_t *read_entry(struct reader *reader, const struct avow_avro_node *value, const uint8_t *at,
                                 struct column *entries, int64_t first, int depth) {
    int64_t length;
    at = read_length(at, reader->end, &length);
    if (at == NULL) return NULL;
    if (entries == NULL) return read_value(reader, value, at + length, NULL, depth);
    struct column *keys = &entries->children[0];
    if (entries->length - first >= MAP_KEYS_MAX || !reserve(&reader->no_memory, entries)) return NULL;
    if (!reserve(&reader->no_memory, keys) || !put_bytes(reader, at, length, keys)) return NULL;
    if (has_key(keys, first, entries->length)) return NULL;
    at = read_value(reader, value, at + length, &entries->children[1], depth);
    if (at != NULL) append(entries);
    return at;
}

/* The blocks of an array or a map, into the column of their items or entries. */
static const uint8_t *read_blocks(struct reader *reader, const struct avow_avro_node *node, const uint8_t *at,
                                  struct column *column, int depth) {
    const struct avow_avro_node *part = part_of(reader, node, 0);
    struct column *items = column == NULL ? NULL : &column->children[0];
    int64_t first = items == NULL ? 0 : items->length, empty = 0, count;
    if (column != NULL && kind_of(column) != (node->op == OP_MAP ? MAP : LIST)) return NULL;
    while ((at = read_long(at, reader->end, &count)) != NULL && count != 0) {
        const uint8_t *behind = NULL;
        if (count < 0) {
            int64_t size;
            if (count == INT64_MIN) return NULL;
            count = -count;
            at = read_length(at, reader->end, &size);
            if (at == NULL) return NULL;
            behind = at + size;
        }
        for (int64_t item = 0; item < count; item++) {
            const uint8_t *start = at;
            at = node->op == OP_MAP ? read_entry(reader, part, at, items, first, depth + 1)
                                    : read_value(reader, part, at, items, depth + 1);
            if (at == NULL || (at == start && ++empty > EMPTY_ITEMS_MAX)) return NULL;
        }
        if (behind != NULL && at != behind) return NULL;
    }
    if (at == NULL || column == NULL) return at;
    if (items->length > INT32_MAX) return NULL;
    column->offsets[column->length + 1] = (int32_t)items->length;
    append(column);
    return at;
}

static const uint8_t *read_record(struct reader *reader, const struct avow_avro_node *node, const uint8_t *at,
                                  struct column *column, int depth) {
    if (column != NULL && kind_of(column) != STRUCT) return NULL;
    for (int64_t number = 0; at != NULL && number < node->part_count; number++) {
        const struct avow_avro_node *part = part_of(reader, node, number);
        struct column *into = NULL;
        if (column != NULL && part->column >= 0) {
            if (part->column >= column->field->child_count) return NULL;
            into = &column->children[part->column];
        }
        if (part->op != OP_DEFAULT) {
            at = read_value(reader, part, at, into, depth + 1);
            continue;
        }
        const uint8_t *end = reader->end;
        reader->end = part->bytes + part->bytes_length;
        bool is_whole = read_value(reader, part_of(reader, part, 0), part->bytes, into, depth + 1) == reader->end;
        reader->end = end;
        if (!is_whole) return NULL;
    }
    if (at != NULL && column != NULL) append(column);
    return at;
}

static const uint8_t *read_member(struct reader *reader, const struct avow_avro_node *node, const uint8_t *at,
                                  struct column *column, int depth) {
    if (kind_of(column) != STRUCT) return NULL;
    for (int32_t child = 0; at != NULL && child < column->field->child_count; child++) {
        if (child == node->size)
            at = read_value(reader, part_of(reader, node, 0), at, &column->children[child], depth + 1);
        else if (!avow_append_null(&reader->no_memory, &column->children[child]))
            return NULL;
    }
    if (at != NULL) append(column);
    return at;
}

static const uint8_t *read_choice(struct reader *reader, const struct avow_avro_node *node, const uint8_t *at,
                                  struct column *column, int depth) {
    int64_t number;
    const uint8_t *behind = read_long(at, reader->end, &number);
    if (behind == NULL || number < 0 || number >= node->part_count) return NULL;
    if (node->op == OP_ENUM && behind - at > 5) return NULL;
    const struct avow_avro_node *part = part_of(reader, node, number);
    if (node->op == OP_UNION) return read_value(reader, part, behind, column, depth + 1);
    if (column == NULL) return behind;
    if (part->op != OP_SYMBOL || kind_of(column) != STRING) return NULL;
    return put_bytes(reader, part->bytes, part->bytes_length, column) ? behind : NULL;
}

/* ---- values ----------------------------------------------------------------------------------------------------- */

static const uint8_t *read_whole(struct reader *reader, const struct avow_avro_node *node, const uint8_t *at,
                                 struct column *column) {
    int64_t value;
    at = read_number(node, at, reader->end, &value);
    if (at == NULL || column == NULL) return at;
    switch (node->op) {
    case OP_DATE: return put_date(column, value) ? at : NULL;
    case OP_TIME: return value >= 0 && value < node->size && put_number(column, value) ? at : NULL;
    case OP_MILLIS:
    case OP_MICROS:
    case OP_NANOS: return put_moment(column, (enum op)node->op, value) ? at : NULL;
    default: return put_number(column, value) ? at : NULL;
    }
}

/* What has a length: before it, or by its type. */
static const uint8_t *read_sized(struct reader *reader, const struct avow_avro_node *node, const uint8_t *at,
                                 struct column *column) {
    int64_t length = node->size;
    if (node->op == OP_FIXED || node->op == OP_DECIMAL_FIXED || node->op == OP_UUID_FIXED) {
        if (length > reader->end - at) return NULL;
    } else {
        at = read_length(at, reader->end, &length);
        if (at == NULL) return NULL;
    }
    if (column == NULL) return at + length;
    bool is_good = false;
    switch (node->op) {
    case OP_DECIMAL_BYTES:
    case OP_DECIMAL_FIXED: is_good = put_decimal(at, length, column); break;
    case OP_UUID_TEXT: is_good = is_uuid(at, length) && put_bytes(reader, at, length, column); break;
    case OP_UUID_FIXED: is_good = length == 16 && put_uuid(reader, at, column); break;
    default: is_good = put_bytes(reader, at, length, column); break;
    }
    return is_good ? at + length : NULL;
}

static const uint8_t *read_boolean(const struct reader *reader, const uint8_t *at, struct column *column) {
    if (at == reader->end || *at > 1) return NULL;
    if (column == NULL) return at + 1;
    if (kind_of(column) != BOOLEAN) return NULL;
    set_last_bit(column->values, column->length, *at == 1);
    append(column);
    return at + 1;
}

/* One value, into its column; without a column it is skipped. */
static const uint8_t *read_value(struct reader *reader, const struct avow_avro_node *node, const uint8_t *at,
                                 struct column *column, int depth) {
    if (column != NULL) {
        if (!reserve(&reader->no_memory, column)) return NULL;
        if (depth > SCHEMA_DEPTH_MAX) return NULL;
    } else if (depth > SKIPPED_DEPTH_MAX) {
        return NULL;
    }
    switch ((enum op)node->op) {
    case OP_NULL:
        if (column == NULL) return at;
        return !column->field->required && avow_append_null(&reader->no_memory, column) ? at : NULL;
    case OP_BOOLEAN: return read_boolean(reader, at, column);
    case OP_INT:
    case OP_LONG:
    case OP_DATE:
    case OP_TIME:
    case OP_MILLIS:
    case OP_MICROS:
    case OP_NANOS: return read_whole(reader, node, at, column);
    case OP_FLOAT: return read_float(at, reader->end, column);
    case OP_DOUBLE: return read_double(at, reader->end, column);
    case OP_BYTES:
    case OP_FIXED:
    case OP_DECIMAL_BYTES:
    case OP_DECIMAL_FIXED:
    case OP_UUID_TEXT:
    case OP_UUID_FIXED: return read_sized(reader, node, at, column);
    case OP_ENUM:
    case OP_UNION: return read_choice(reader, node, at, column, depth);
    case OP_ARRAY:
    case OP_MAP: return read_blocks(reader, node, at, column, depth);
    case OP_RECORD: return read_record(reader, node, at, column, depth);
    case OP_MEMBER: return column == NULL ? NULL : read_member(reader, node, at, column, depth);
    case OP_SYMBOL:
    case OP_DEFAULT:
    case OP_DOUBT:
    case OPS: break;
    }
    return NULL;
}

static bool read_row_of(void *state, const uint8_t *start, const uint8_t *end, struct column *record) {
    struct reader *reader = state;
    if (end - start < reader->skip) return false;
    reader->end = end;
    return read_value(reader, reader->nodes, start + reader->skip, record, 0) == end;
}

static bool is_good_node(const struct avow_avro_node *node, int64_t part_count) {
    if (node->op < 0 || node->op >= OPS || node->part_count < 0 || node->first_part < 0) return false;
    if (node->part_count > part_count - node->first_part || node->size < 0 || node->bytes_length < 0) return false;
    switch (node->op) {
    case OP_ARRAY:
    case OP_MAP:
    case OP_MEMBER:
    case OP_DEFAULT: return node->part_count == 1;
    default: return true;
    }
}

/* See avow_read_rows. The first node is the record's; `skip`: how many bytes stand before each record. */
int64_t avow_avro_read(const struct avow_field *fields, int64_t field_count, const struct avow_avro_node *nodes,
                       int64_t node_count, const int32_t *parts, int64_t part_count, int32_t rules, int64_t skip,
                       const uint8_t *data, int64_t data_length, const int32_t *offsets, int64_t rows,
                       int64_t *doubtful, struct ArrowArray *out) {
    struct reader reader = {.nodes = nodes, .parts = parts, .skip = skip, .refuse_nul = rules & REFUSE_NUL};
    struct values values = {data, data_length, offsets, rows};
    if (node_count < 1 || part_count < 0 || skip < 0) return BAD_ARGUMENT;
    for (int64_t node = 0; node < node_count; node++)
        if (!is_good_node(&nodes[node], part_count)) return BAD_ARGUMENT;
    for (int64_t part = 0; part < part_count; part++)
        if (parts[part] < 0 || parts[part] >= node_count) return BAD_ARGUMENT;
    return avow_read_rows(fields, field_count, &values, read_row_of, &reader, &reader.no_memory, doubtful, out);
}
