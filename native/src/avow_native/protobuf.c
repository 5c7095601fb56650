/* Messages of Protocol Buffers into Arrow columns, by the layout of a message.
 *
 * The contract is that of every decoder: see columns.h. The strict reader is avow's formats/protobuf/reader.py, which is
 * made of the same layout (formats/protobuf/layout.py) and knows the reasons.
 *
 * How it works. Each field of the layout is a node and a column. One pass over the bytes of a message: a tag is looked
 * for among the fields, first of all the one that is due, because writers keep the order of the numbers; its value is
 * read straight into its column. A message of a struct with n rows gives row n: a field was already there if its column
 * has n + 1 values (doubt), and was absent if it still has n (null, its default, or doubt if it is required). Elements
 * and entries go behind one another whenever they come, and the list is closed with the message. A default is bytes as
 * in a message, and is read as if it stood there.
 *
 * What is checked, because the strict reader checks it: that varints, lengths and numbers fit, the wire type of every
 * field, booleans, numbers of enums, UTF-8 and NUL in text, times against the calendar, keys of a map that occur twice.
 *
 * What is left to doubt, because it is rare: a field that is not repeated and comes twice, two members of a oneof,
 * unknown numbers of enums, unknown fields in well-known messages and entries of maps, groups, JSON values, maps with
 * many keys, another message of the schema than the one that is due.
 */

#include "columns.h"

enum {
    MAP_KEYS_MAX = 128,
    FIELD_NUMBER_MAX = (1 << 29) - 1,
    VARINT_BYTES_MAX = 10,
    SHORT_BYTES_MAX = 5, /* of a tag or a length */
    KEY_CHARS_MAX = 20,  /* of a number as text */
    MICROS = 1000000,
};

static const int64_t SECONDS_MIN = -INT64_C(62135596800), SECONDS_MAX = INT64_C(253402300799);
static const int64_t DURATION_SECONDS_MAX = INT64_C(315576000000);
static const int64_t NANOS_MAX = 999999999;

/* The same numbers as in protobuf.py. */
enum op {
    OP_BOOL = 0,
    OP_INT32 = 1,
    OP_INT64 = 2,
    OP_UINT32 = 3, /* into a column of 64 bits */
    OP_UINT64 = 4, /* into a decimal */
    OP_SINT32 = 5,
    OP_SINT64 = 6,
    OP_FIXED32 = 7,
    OP_FIXED64 = 8,
    OP_SFIXED32 = 9,
    OP_SFIXED64 = 10,
    OP_FLOAT = 11,
    OP_DOUBLE = 12,
    OP_STRING = 13,
    OP_BYTES = 14,
    OP_ENUM = 15,    /* into text; `numbers` and `names` */
    OP_MESSAGE = 16, /* its parts are fields, those of the struct, in its order */
    OP_WRAPPED = 17, /* its part is the field 1 */
    OP_TIMESTAMP = 18,
    OP_DURATION = 19,
    OP_EMPTY = 20,
    OP_DATE = 21,
    OP_DECIMAL = 22,
    OP_DOUBT = 23,
    OPS = 24,
};

enum many { ONE = 0, MANY_LIST = 1, MANY_MAP = 2 }; /* a map's parts are key and value */
enum absent { ABSENT_NULL = 0, ABSENT_DEFAULT = 1, ABSENT_DOUBT = 2 };
enum wire { WIRE_VARINT = 0, WIRE_FIXED64 = 1, WIRE_LENGTH = 2, WIRE_FIXED32 = 5 };

struct avow_protobuf_node {
    int32_t op;
    int32_t number; /* of the field */
    int32_t many;
    int32_t absent;
    int32_t oneof; /* fields of one message that have the same, not 0, exclude one another */
    int32_t first_part;
    int32_t part_count;
    int32_t name_count; /* of an enum */
    const uint8_t *initial; /* the default, as a value in a message */
    int64_t initial_length;
    const int32_t *numbers; /* of an enum, ascending */
    const int32_t *name_ends; /* in `names`; each begins where the one before it ends */
    const uint8_t *names;
};

enum { REFUSE_NUL = 1, IGNORE_UNKNOWN = 2 };

/* `nodes`: the first is the message itself; parts of a node stand behind one another. `skip`: bytes before each record,
 * and then come those of `prefix`, or the record is doubtful. */
int64_t avow_protobuf_read(const struct avow_field *fields, int64_t field_count, const struct avow_protobuf_node *nodes,
                           int64_t node_count, int32_t rules, int64_t skip, const uint8_t *prefix,
                           int64_t prefix_length, const uint8_t *data, int64_t data_length, const int32_t *offsets,
                           int64_t rows, int64_t *doubtful, struct ArrowArray *out);

struct reader {
    const struct avow_protobuf_node *nodes;
    int64_t skip;
    const uint8_t *prefix;
    int64_t prefix_length;
    bool refuse_nul;
    bool ignore_unknown;
    bool no_memory;
};

static const uint8_t *read_value(struct reader *reader, const struct avow_protobuf_node *node, const uint8_t *at,
                                 const uint8_t *end, struct column *column);

/* ---- the wire --------------------------------------------------------------------------------------------------- */

static inline const uint8_t *read_varint(const uint8_t *at, const uint8_t *end, uint64_t *value) {
    if (at < end && *at < 0x80) {
        *value = *at;
        return at + 1;
    }
    uint64_t number = 0;
    for (int shift = 0; shift < 7 * VARINT_BYTES_MAX && at < end; shift += 7) {
        uint8_t byte = *at++;
        if (shift == 63 && byte > 1) return NULL;
        number |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            *value = number;
            return at;
        }
    }
    return NULL;
}

static inline const uint8_t *read_tag(const uint8_t *at, const uint8_t *end, int32_t *number, enum wire *wire) {
    uint64_t tag;
    const uint8_t *after = read_varint(at, end, &tag);
    if (after == NULL || after - at > SHORT_BYTES_MAX || tag >> 3 == 0 || tag >> 3 > FIELD_NUMBER_MAX) return NULL;
    *number = (int32_t)(tag >> 3);
    *wire = (enum wire)(tag & 7);
    return after;
}

/* The place where the bytes end whose length stands here; they begin at *start. */
static inline const uint8_t *read_length(const uint8_t *at, const uint8_t *end, const uint8_t **start) {
    uint64_t length;
    const uint8_t *after = read_varint(at, end, &length);
    if (after == NULL || after - at > SHORT_BYTES_MAX || length > (uint64_t)(end - after)) return NULL;
    *start = after;
    return after + length;
}

static const uint8_t *skip_value(const uint8_t *at, const uint8_t *end, enum wire wire) {
    uint64_t ignored;
    const uint8_t *start;
    switch (wire) {
    case WIRE_VARINT: return read_varint(at, end, &ignored);
    case WIRE_FIXED64: return end - at < 8 ? NULL : at + 8;
    case WIRE_LENGTH: return read_length(at, end, &start);
    case WIRE_FIXED32: return end - at < 4 ? NULL : at + 4;
    }
    return NULL; /* groups, too */
}

static enum wire wire_of(int32_t op) {
    switch (op) {
    case OP_FIXED32:
    case OP_SFIXED32:
    case OP_FLOAT: return WIRE_FIXED32;
    case OP_FIXED64:
    case OP_SFIXED64:
    case OP_DOUBLE: return WIRE_FIXED64;
    case OP_STRING:
    case OP_BYTES:
    case OP_MESSAGE:
    case OP_WRAPPED:
    case OP_TIMESTAMP:
    case OP_DURATION:
    case OP_EMPTY:
    case OP_DATE:
    case OP_DECIMAL:
    case OP_DOUBT: return WIRE_LENGTH;
    default: return WIRE_VARINT;
    }
}

static inline uint32_t load32(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static inline uint64_t load64(const uint8_t *at) { return (uint64_t)load32(at) | (uint64_t)load32(at + 4) << 32; }

/* ---- values ----------------------------------------------------------------------------------------------------- */

static inline void put32(struct column *column, int32_t value) { put(column, &value, sizeof value); }

static inline void put64(struct column *column, int64_t value) { put(column, &value, sizeof value); }

static inline void put_decimal(struct column *column, uint64_t value) {
    uint128 wide = value;
    put(column, &wide, sizeof wide);
}

static inline const uint8_t *read_number(enum op op, const uint8_t *at, const uint8_t *end, struct column *column) {
    uint64_t bits;
    at = read_varint(at, end, &bits);
    if (at == NULL) return NULL;
    int64_t number = (int64_t)bits;
    switch (op) {
    case OP_BOOL:
        if (bits > 1) return NULL;
        set_last_bit(column->values, column->length, bits == 1);
        append(column);
        return at;
    case OP_INT32:
        if (number < INT32_MIN || number > INT32_MAX) return NULL;
        put32(column, (int32_t)number);
        return at;
    case OP_INT64: put64(column, number); return at;
    case OP_UINT32:
        if (bits > UINT32_MAX) return NULL;
        put64(column, number);
        return at;
    case OP_UINT64: put_decimal(column, bits); return at;
    case OP_SINT32:
        if (bits > UINT32_MAX) return NULL;
        put32(column, (int32_t)((uint32_t)bits >> 1 ^ (0 - ((uint32_t)bits & 1))));
        return at;
    case OP_SINT64: put64(column, (int64_t)(bits >> 1 ^ (0 - (bits & 1)))); return at;
    default: return NULL;
    }
}

static inline const uint8_t *read_fixed(enum op op, const uint8_t *at, const uint8_t *end, struct column *column) {
    ptrdiff_t width = wire_of(op) == WIRE_FIXED64 ? 8 : 4;
    if (end - at < width) return NULL;
    uint32_t half = load32(at);
    uint64_t whole = width == 8 ? load64(at) : half;
    switch (op) {
    case OP_FIXED32: put64(column, (int64_t)whole); break;
    case OP_FIXED64: put_decimal(column, whole); break;
    case OP_SFIXED32:
    case OP_FLOAT: put(column, &half, 4); break;
    default: put(column, &whole, 8); break; /* SFIXED64, DOUBLE */
    }
    return at + width;
}

static const uint8_t *read_text(struct reader *reader, enum op op, const uint8_t *at, const uint8_t *end,
                                struct column *column) {
    const uint8_t *start, *stop = read_length(at, end, &start);
    if (stop == NULL || (op == OP_STRING && !is_text(start, stop, reader->refuse_nul))) return NULL;
    return put_text(&reader->no_memory, start, stop - start, column) ? stop : NULL;
}

static const uint8_t *read_enum(struct reader *reader, const struct avow_protobuf_node *node, const uint8_t *at,
                                const uint8_t *end, struct column *column) {
    uint64_t bits;
    at = read_varint(at, end, &bits);
    if (at == NULL) return NULL;
    int64_t number = (int64_t)bits;
    int32_t low = 0, high = node->name_count;
    if (number >= 0 && number < high && node->numbers[number] == number) {
        low = (int32_t)number; /* most begin at 0 and leave none out */
    } else {
        while (low < high) {
            int32_t middle = low + (high - low) / 2;
            if (node->numbers[middle] < number)
                low = middle + 1;
            else
                high = middle;
        }
        if (low == node->name_count || node->numbers[low] != number) return NULL;
    }
    int32_t start = low > 0 ? node->name_ends[low - 1] : 0;
    return put_text(&reader->no_memory, node->names + start, node->name_ends[low] - start, column) ? at : NULL;
}

static const uint8_t *read_wrapped(struct reader *reader, const struct avow_protobuf_node *node, const uint8_t *at,
                                   const uint8_t *end, struct column *column) {
    const struct avow_protobuf_node *inner = &reader->nodes[node->first_part];
    const uint8_t *start, *stop = read_length(at, end, &start);
    int32_t number;
    enum wire wire;
    if (stop == NULL) return NULL;
    if (start == stop)
        return read_value(reader, inner, inner->initial, inner->initial + inner->initial_length, column) ? stop : NULL;
    start = read_tag(start, stop, &number, &wire);
    if (start == NULL || number != 1 || wire != wire_of(inner->op)) return NULL;
    return read_value(reader, inner, start, stop, column) == stop ? stop : NULL;
}

/* A message whose fields 1 to `count` are whole numbers, each there once or absent, which is 0. Its end, or NULL. */
static const uint8_t *read_numbers(const uint8_t *at, const uint8_t *end, int32_t count, int64_t *numbers) {
    const uint8_t *stop = read_length(at, end, &at);
    uint32_t there = 0;
    if (stop == NULL) return NULL;
    while (at < stop) {
        int32_t number;
        enum wire wire;
        uint64_t bits;
        at = read_tag(at, stop, &number, &wire);
        if (at == NULL || number > count || wire != WIRE_VARINT || (there >> number & 1)) return NULL;
        at = read_varint(at, stop, &bits);
        if (at == NULL) return NULL;
        numbers[number - 1] = (int64_t)bits;
        there |= 1u << number;
    }
    return stop;
}

/* Seconds and nanoseconds, as Timestamp and Duration have them, in microseconds. */
static const uint8_t *read_span(enum op op, const uint8_t *at, const uint8_t *end, struct column *column) {
    int64_t parts[2] = {0, 0};
    const uint8_t *stop = read_numbers(at, end, 2, parts);
    if (stop == NULL) return NULL;
    int64_t seconds = parts[0], nanos = parts[1];
    if (nanos < -NANOS_MAX || nanos > NANOS_MAX || nanos % 1000 != 0) return NULL;
    if (op == OP_TIMESTAMP) {
        if (nanos < 0 || seconds < SECONDS_MIN || seconds > SECONDS_MAX) return NULL;
    } else {
        if (seconds < -DURATION_SECONDS_MAX || seconds > DURATION_SECONDS_MAX) return NULL;
        if ((seconds < 0 && nanos > 0) || (seconds > 0 && nanos < 0)) return NULL;
    }
    put64(column, seconds * MICROS + nanos / 1000);
    return stop;
}

/* Year, month and day, as days from 1970-01-01 on. */
static const uint8_t *read_date(const uint8_t *at, const uint8_t *end, struct column *column) {
    static const int lengths[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    static const int before[] = {0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334};
    int64_t parts[3] = {0, 0, 0};
    const uint8_t *stop = read_numbers(at, end, 3, parts);
    int64_t year = parts[0], month = parts[1], day = parts[2];
    if (stop == NULL || year < 1 || year > 9999 || month < 1 || month > 12 || day < 1) return NULL;
    bool is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    if (day > lengths[month - 1] + (month == 2 && is_leap)) return NULL;
    int64_t past = year - 1, days = past * 365 + past / 4 - past / 100 + past / 400;
    days += before[month - 1] + (month > 2 && is_leap) + day - 1 - 719162; /* those from 0001-01-01 to 1970-01-01 */
    put32(column, (int32_t)days);
    return stop;
}

/* Units as bytes, big-endian, and their scale, which must be the column's. */
static const uint8_t *read_decimal(const uint8_t *at, const uint8_t *end, struct column *column) {
    const uint8_t *units = NULL, *units_end = NULL, *stop = read_length(at, end, &at);
    uint64_t scale = 0, bits;
    uint32_t there = 0;
    if (stop == NULL) return NULL;
    while (at < stop) {
        int32_t number;
        enum wire wire;
        at = read_tag(at, stop, &number, &wire);
        if (at == NULL || number > 3 || wire != (number == 1 ? WIRE_LENGTH : WIRE_VARINT)) return NULL;
        if (there >> number & 1) return NULL;
        there |= 1u << number;
        if (number == 1) {
            at = units_end = read_length(at, stop, &units);
        } else {
            at = read_varint(at, stop, &bits);
            if (at == NULL || bits > INT32_MAX) return NULL;
            if (number == 3) scale = bits;
        }
        if (at == NULL) return NULL;
    }
    if (units == NULL || units == units_end || units_end - units > 16) return NULL;
    if (scale != (uint64_t)column->field->scale) return NULL;
    bool negative = *units & 0x80;
    uint128 value = negative ? ~(uint128)0 : 0;
    while (units < units_end) value = value << 8 | *units++;
    if ((negative ? 0 - value : value) >= power_of_ten(column->field->precision)) return NULL;
    put(column, &value, sizeof value);
    return stop;
}

/* ---- messages --------------------------------------------------------------------------------------------------- */

static const uint8_t *read_key(struct reader *reader, const struct avow_protobuf_node *node, const uint8_t *at,
                               const uint8_t *end, struct column *column) {
    if (node->op == OP_STRING) return read_text(reader, OP_STRING, at, end, column);
    uint64_t bits;
    enum wire wire = wire_of(node->op);
    if (wire == WIRE_VARINT) {
        at = read_varint(at, end, &bits);
        if (at == NULL) return NULL;
    } else {
        ptrdiff_t width = wire == WIRE_FIXED64 ? 8 : 4;
        if (end - at < width) return NULL;
        bits = width == 8 ? load64(at) : load32(at);
        at += width;
    }
    int64_t number = (int64_t)bits;
    switch (node->op) {
    case OP_BOOL: {
        const char *word = bits == 1 ? "true" : "false";
        if (bits > 1 || !put_text(&reader->no_memory, (const uint8_t *)word, (int64_t)strlen(word), column)) return NULL;
        return at;
    }
    case OP_INT32:
        if (number < INT32_MIN || number > INT32_MAX) return NULL;
        break;
    case OP_UINT32:
    case OP_SINT32:
        if (bits > UINT32_MAX) return NULL;
        break;
    default: break;
    }
    if (node->op == OP_SINT32 || node->op == OP_SINT64) number = (int64_t)(bits >> 1 ^ (0 - (bits & 1)));
    if (node->op == OP_SFIXED32) number = (int32_t)(uint32_t)bits;
    bool negative = number < 0 && node->op != OP_UINT64 && node->op != OP_FIXED64;
    uint64_t digits = negative ? 0 - (uint64_t)number : (uint64_t)number;
    uint8_t text[KEY_CHARS_MAX + 1], *first = text + sizeof text;
    do {
        *--first = (uint8_t)('0' + digits % 10);
        digits /= 10;
    } while (digits != 0);
    if (negative) *--first = '-';
    return put_text(&reader->no_memory, first, text + sizeof text - first, column) ? at : NULL;
}

static bool is_duplicate_key(const struct column *keys, int64_t first) {
    int64_t last = keys->length - 1;
    const uint8_t *text = keys->text.start;
    int32_t start = keys->offsets[last], length = keys->offsets[last + 1] - start;
    for (int64_t index = first; index < last; index++) {
        int32_t other = keys->offsets[index];
        if (keys->offsets[index + 1] - other == length && memcmp(text + other, text + start, (size_t)length) == 0)
            return true;
    }
    return false;
}

static const uint8_t *initial_end(const struct avow_protobuf_node *node) { return node->initial + node->initial_length; }

/* One entry of a map, behind those of the same map that came before it, from `first` on. */
static const uint8_t *read_entry(struct reader *reader, const struct avow_protobuf_node *node, const uint8_t *at,
                                 const uint8_t *end, struct column *entries, int64_t first) {
    const struct avow_protobuf_node *key = &reader->nodes[node->first_part], *value = key + 1;
    struct column *keys = &entries->children[0], *values = &entries->children[1];
    int64_t row = entries->length;
    const uint8_t *stop = read_length(at, end, &at);
    if (stop == NULL || row - first >= MAP_KEYS_MAX) return NULL;
    if (!reserve(&reader->no_memory, entries) || !reserve(&reader->no_memory, keys)) return NULL;
    while (at < stop) {
        int32_t number;
        enum wire wire;
        at = read_tag(at, stop, &number, &wire);
        if (at == NULL) return NULL;
        if (number == 1 && wire == wire_of(key->op) && keys->length == row)
            at = read_key(reader, key, at, stop, keys);
        else if (number == 2 && wire == wire_of(value->op) && values->length == row)
            at = read_value(reader, value, at, stop, values);
        else
            return NULL;
        if (at == NULL) return NULL;
    }
    if (keys->length == row && read_key(reader, key, key->initial, initial_end(key), keys) == NULL) return NULL;
    if (values->length == row && read_value(reader, value, value->initial, initial_end(value), values) == NULL)
        return NULL;
    if (is_duplicate_key(keys, first)) return NULL;
    append(entries);
    return stop;
}

/* Elements, packed or one. Only the one that is not packed if the type's wire type says so. */
static const uint8_t *read_elements(struct reader *reader, const struct avow_protobuf_node *node, const uint8_t *at,
                                    const uint8_t *end, enum wire wire, struct column *elements) {
    enum wire due = wire_of(node->op);
    if (wire == due) return read_value(reader, node, at, end, elements);
    if (wire != WIRE_LENGTH || due == WIRE_LENGTH) return NULL;
    const uint8_t *stop = read_length(at, end, &at);
    if (stop == NULL) return NULL;
    while (at < stop) {
        at = read_value(reader, node, at, stop, elements);
        if (at == NULL) return NULL;
    }
    return stop;
}

static bool has_rival(const struct avow_protobuf_node *parts, int32_t count, int32_t oneof, const struct column *column) {
    for (int32_t index = 0; index < count; index++)
        if (parts[index].oneof == oneof && column->children[index].length != column->length) return true;
    return false;
}

static const uint8_t *read_field(struct reader *reader, const struct avow_protobuf_node *parts, int32_t count,
                                 int32_t index, enum wire wire, const uint8_t *at, const uint8_t *end,
                                 struct column *column) {
    const struct avow_protobuf_node *node = &parts[index];
    struct column *field = &column->children[index];
    switch (node->many) {
    case ONE:
        if (wire != wire_of(node->op) || field->length != column->length) return NULL;
        if (node->oneof != 0 && has_rival(parts, count, node->oneof, column)) return NULL;
        return read_value(reader, node, at, end, field);
    case MANY_LIST: return read_elements(reader, node, at, end, wire, &field->children[0]);
    default:
        if (wire != WIRE_LENGTH) return NULL;
        return read_entry(reader, node, at, end, &field->children[0], field->offsets[field->length]);
    }
}

/* What was not there, and lists, which end with the message. */
static bool close_field(struct reader *reader, const struct avow_protobuf_node *node, int64_t row,
                        struct column *field) {
    if (node->many != ONE) {
        if (!reserve(&reader->no_memory, field) || field->children[0].length > INT32_MAX) return false;
        field->offsets[row + 1] = (int32_t)field->children[0].length;
        append(field);
        return true;
    }
    if (field->length != row) return true;
    switch (node->absent) {
    case ABSENT_NULL: return avow_append_null(&reader->no_memory, field);
    case ABSENT_DEFAULT: return read_value(reader, node, node->initial, initial_end(node), field) != NULL;
    default: return false;
    }
}

static bool read_message(struct reader *reader, const struct avow_protobuf_node *node, const uint8_t *at,
                         const uint8_t *end, struct column *column) {
    const struct avow_protobuf_node *parts = &reader->nodes[node->first_part];
    int32_t count = node->part_count, due = 0;
    int64_t row = column->length;
    while (at < end) {
        int32_t number, index = due, tried = 0;
        enum wire wire;
        at = read_tag(at, end, &number, &wire);
        if (at == NULL) return false;
        for (; tried < count && parts[index].number != number; tried++) index = index + 1 < count ? index + 1 : 0;
        if (tried < count) {
            at = read_field(reader, parts, count, index, wire, at, end, column);
            due = parts[index].many == ONE && index + 1 < count ? index + 1 : index;
        } else {
            at = reader->ignore_unknown ? skip_value(at, end, wire) : NULL;
        }
        if (at == NULL) return false;
    }
    for (int32_t index = 0; index < count; index++)
        if (!close_field(reader, &parts[index], row, &column->children[index])) return false;
    append(column);
    return true;
}

/* One value, from behind its tag, at the end of the column. */
static const uint8_t *read_value(struct reader *reader, const struct avow_protobuf_node *node, const uint8_t *at,
                                 const uint8_t *end, struct column *column) {
    if (!reserve(&reader->no_memory, column)) return NULL;
    const uint8_t *start, *stop;
    enum op op = (enum op)node->op;
    switch (op) {
    case OP_BOOL:
    case OP_INT32:
    case OP_INT64:
    case OP_UINT32:
    case OP_UINT64:
    case OP_SINT32:
    case OP_SINT64: return read_number(op, at, end, column);
    case OP_FIXED32:
    case OP_FIXED64:
    case OP_SFIXED32:
    case OP_SFIXED64:
    case OP_FLOAT:
    case OP_DOUBLE: return read_fixed(op, at, end, column);
    case OP_STRING:
    case OP_BYTES: return read_text(reader, op, at, end, column);
    case OP_ENUM: return read_enum(reader, node, at, end, column);
    case OP_MESSAGE:
        stop = read_length(at, end, &start);
        return stop != NULL && read_message(reader, node, start, stop, column) ? stop : NULL;
    case OP_WRAPPED: return read_wrapped(reader, node, at, end, column);
    case OP_TIMESTAMP:
    case OP_DURATION: return read_span(op, at, end, column);
    case OP_DATE: return read_date(at, end, column);
    case OP_DECIMAL: return read_decimal(at, end, column);
    case OP_EMPTY:
        stop = read_length(at, end, &start);
        if (stop == NULL || start != stop) return NULL;
        set_last_bit(column->values, column->length, true);
        append(column);
        return stop;
    case OP_DOUBT:
    case OPS: break;
    }
    return NULL;
}

static bool read_record(void *state, const uint8_t *start, const uint8_t *end, struct column *record) {
    struct reader *reader = state;
    if (start == end || end - start < reader->skip + reader->prefix_length) return false;
    start += reader->skip;
    if (reader->prefix_length > 0 && memcmp(start, reader->prefix, (size_t)reader->prefix_length) != 0) return false;
    if (!reserve(&reader->no_memory, record)) return false;
    return read_message(reader, reader->nodes, start + reader->prefix_length, end, record);
}

/* ---- from the layout -------------------------------------------------------------------------------------------- */

static bool holds(enum op op, const struct avow_field *field) {
    static const uint8_t kinds[OPS] = {
        [OP_BOOL] = BOOLEAN,        [OP_INT32] = INT32,      [OP_INT64] = INT64,          [OP_UINT32] = INT64,
        [OP_UINT64] = DECIMAL,      [OP_SINT32] = INT32,     [OP_SINT64] = INT64,         [OP_FIXED32] = INT64,
        [OP_FIXED64] = DECIMAL,     [OP_SFIXED32] = INT32,   [OP_SFIXED64] = INT64,       [OP_FLOAT] = FLOAT,
        [OP_DOUBLE] = DOUBLE,       [OP_STRING] = STRING,    [OP_BYTES] = BINARY,         [OP_ENUM] = STRING,
        [OP_MESSAGE] = STRUCT,      [OP_TIMESTAMP] = TIMESTAMP, [OP_DURATION] = INT64,    [OP_EMPTY] = BOOLEAN,
        [OP_DATE] = DATE,           [OP_DECIMAL] = DECIMAL,  [OP_DOUBT] = STRING,
    };
    return field->kind == kinds[op];
}

/* Whether the value of a node goes into the field at *next and those inside it, which are passed over. */
static bool fits(const struct avow_protobuf_node *nodes, int64_t node_count, int64_t index,
                 const struct avow_field *fields, int64_t field_count, int64_t *next, int depth);

static bool parts_fit(const struct avow_protobuf_node *nodes, int64_t node_count, const struct avow_protobuf_node *node,
                      const struct avow_field *fields, int64_t field_count, int64_t *next, int depth) {
    for (int32_t part = 0; part < node->part_count; part++) {
        const struct avow_protobuf_node *inner = &nodes[node->first_part + part];
        if (inner->many != ONE) {
            int32_t kind = inner->many == MANY_LIST ? LIST : MAP;
            if (*next >= field_count || fields[(*next)++].kind != kind) return false;
            if (kind == MAP) { /* its entries, then the key, which is text whatever its type, then the value */
                if (*next + 2 > field_count || inner->part_count != 2) return false;
                if (inner->first_part < 0 || inner->first_part > node_count - 2) return false;
                *next += 2;
                if (!fits(nodes, node_count, inner->first_part + 1, fields, field_count, next, depth + 1)) return false;
                continue;
            }
        }
        if (!fits(nodes, node_count, node->first_part + part, fields, field_count, next, depth + 1)) return false;
    }
    return true;
}

static bool fits(const struct avow_protobuf_node *nodes, int64_t node_count, int64_t index,
                 const struct avow_field *fields, int64_t field_count, int64_t *next, int depth) {
    const struct avow_protobuf_node *node = &nodes[index];
    int64_t last = (int64_t)node->first_part + node->part_count;
    if (depth > SCHEMA_DEPTH_MAX || node->op < 0 || node->op >= OPS || *next >= field_count) return false;
    if (node->part_count < 0 || node->first_part < 0 || last > node_count) return false;
    if (node->op == OP_WRAPPED)
        return node->part_count == 1 && nodes[node->first_part].op < OP_ENUM &&
               fits(nodes, node_count, node->first_part, fields, field_count, next, depth + 1);
    const struct avow_field *field = &fields[(*next)++];
    if (!holds((enum op)node->op, field)) return false;
    if (node->op != OP_MESSAGE) return true;
    return field->child_count == node->part_count &&
           parts_fit(nodes, node_count, node, fields, field_count, next, depth);
}

/* See avow_read_rows for what comes back. */
int64_t avow_protobuf_read(const struct avow_field *fields, int64_t field_count, const struct avow_protobuf_node *nodes,
                           int64_t node_count, int32_t rules, int64_t skip, const uint8_t *prefix,
                           int64_t prefix_length, const uint8_t *data, int64_t data_length, const int32_t *offsets,
                           int64_t rows, int64_t *doubtful, struct ArrowArray *out) {
    struct reader reader = {
        .nodes = nodes,
        .skip = skip,
        .prefix = prefix,
        .prefix_length = prefix_length,
        .refuse_nul = rules & REFUSE_NUL,
        .ignore_unknown = rules & IGNORE_UNKNOWN,
    };
    struct values values = {.data = data, .data_length = data_length, .offsets = offsets, .rows = rows};
    int64_t next = 0;
    *out = (struct ArrowArray){0};
    if (node_count < 1 || nodes[0].op != OP_MESSAGE || skip < 0 || prefix_length < 0) return BAD_ARGUMENT;
    if (!fits(nodes, node_count, 0, fields, field_count, &next, 0) || next != field_count) return BAD_ARGUMENT;
    return avow_read_rows(fields, field_count, &values, read_record, &reader, &reader.no_memory, doubtful, out);
}
