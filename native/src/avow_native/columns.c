/* Columns: making them from their declaration, growing them, and giving them to Arrow. See columns.h. */

#include "columns.h"

/* Room for `capacity` values. Capacities stay far below 2^40, so that no size overflows. */
bool avow_set_capacity(struct column *column, int64_t capacity) {
    enum kind kind = kind_of(column);
    int64_t bits = capacity / 8 + 1, values = kind == BOOLEAN ? bits : capacity * width_of(kind);
    if (has_values(kind) && !resize((void **)&column->values, values)) return false;
    if (column->validity != NULL && !resize((void **)&column->validity, bits)) return false;
    if (has_offsets(kind)) {
        bool is_new = column->offsets == NULL;
        if (!resize((void **)&column->offsets, (capacity + 1) * (int64_t)sizeof(int32_t))) return false;
        if (is_new) column->offsets[0] = 0;
    }
    column->capacity = capacity;
    return true;
}

bool avow_append_null(bool *no_memory, struct column *column) {
    if (!reserve(no_memory, column)) return false;
    enum kind kind = kind_of(column);
    int64_t at = column->length, width = width_of(kind);
    if (column->validity == NULL) {
        if (!resize((void **)&column->validity, column->capacity / 8 + 1)) {
            *no_memory = true;
            return false;
        }
        memset(column->validity, 0xff, (size_t)(column->capacity / 8 + 1));
    }
    set_last_bit(column->validity, at, false);
    if (kind == BOOLEAN) set_last_bit(column->values, at, false);
    if (width > 0) memset(column->values + at * width, 0, (size_t)width);
    if (has_offsets(kind)) column->offsets[at + 1] = column->offsets[at];
    for (int32_t child = 0; kind == STRUCT && child < column->field->child_count; child++)
        if (!avow_append_null(no_memory, &column->children[child])) return false;
    column->length++;
    return true;
}

/* Back to `length` values, whatever was half written behind them. */
void avow_truncate_column(struct column *column, int64_t length) {
    enum kind kind = kind_of(column);
    column->length = length;
    if (has_text(kind)) column->text.length = column->offsets[length];
    if (kind == LIST || kind == MAP) avow_truncate_column(&column->children[0], column->offsets[length]);
    for (int32_t child = 0; kind == STRUCT && child < column->field->child_count; child++)
        avow_truncate_column(&column->children[child], length);
}

static void free_column(struct column *column) {
    for (int32_t child = 0; column->children != NULL && child < column->field->child_count; child++)
        free_column(&column->children[child]);
    free(column->children);
    free(column->validity);
    free(column->values);
    free(column->offsets);
    free(column->text.start);
}

static bool is_good_field(const struct avow_field *field) {
    int32_t children = field->child_count;
    if (field->kind < 0 || field->kind >= KINDS || children < 0 || field->name_length < 0) return false;
    switch (field->kind) {
    case DECIMAL: {
        bool is_precise = field->precision >= 1 && field->precision <= DIGITS_MAX;
        return is_precise && field->scale >= 0 && field->scale <= field->precision && children == 0;
    }
    case LIST:
    case MAP: return children == 1;
    case STRUCT: return true;
    default: return children == 0;
    }
}

/* The column of the field at *next and those inside it. 0, NO_MEMORY or BAD_ARGUMENT; after any, free_column. */
static int make_column(struct column *column, const struct avow_field *fields, int64_t field_count, int64_t *next,
                       int64_t capacity, int depth) {
    if (*next >= field_count || depth > SCHEMA_DEPTH_MAX || !is_good_field(&fields[*next])) return BAD_ARGUMENT;
    const struct avow_field *field = column->field = &fields[(*next)++];
    if (field->child_count > field_count) return BAD_ARGUMENT;
    if (!avow_set_capacity(column, capacity)) return NO_MEMORY;
    if (field->child_count == 0) return 0;
    column->children = calloc((size_t)field->child_count, sizeof *column->children);
    if (column->children == NULL) return NO_MEMORY;
    /* free_column looks at every child's field. */
    for (int32_t child = 0; child < field->child_count; child++) column->children[child].field = field;
    for (int32_t child = 0; child < field->child_count; child++) {
        int64_t inner = field->kind == STRUCT ? capacity : FIRST_CAPACITY;
        int result = make_column(&column->children[child], fields, field_count, next, inner, depth + 1);
        if (result != 0) return result;
    }
    const struct column *entries = column->children;
    if (field->kind == MAP && (kind_of(entries) != STRUCT || entries->field->child_count != 2)) return BAD_ARGUMENT;
    if (field->kind == MAP && kind_of(&entries->children[0]) != STRING) return BAD_ARGUMENT;
    return 0;
}

struct exported {
    const void *buffers[3];
    struct ArrowArray *children[];
};

static void release(struct ArrowArray *array) {
    struct exported *owned = array->private_data;
    for (int64_t child = 0; child < array->n_children; child++) {
        struct ArrowArray *inner = owned->children[child];
        if (inner == NULL) continue;
        if (inner->release != NULL) inner->release(inner);
        free(inner);
    }
    for (int64_t buffer = 0; buffer < 3; buffer++) free((void *)(uintptr_t)owned->buffers[buffer]);
    free(owned);
    array->release = NULL;
}

/* What a column grew beyond what it holds is given back. */
static void shrink(struct column *column) {
    (void)avow_set_capacity(column, column->length);
    if (has_text(kind_of(column))) (void)resize((void **)&column->text.start, column->text.length);
}

/* Moves the column's buffers into an Arrow array. What could not be moved is still the column's. */
static bool export_column(struct column *column, struct ArrowArray *array) {
    enum kind kind = kind_of(column);
    int64_t children = column->field->child_count;
    struct exported *owned = calloc(1, sizeof *owned + (size_t)children * sizeof owned->children[0]);
    *array = (struct ArrowArray){0};
    if (owned == NULL) return false;
    shrink(column);
    int64_t buffers = 0;
    owned->buffers[buffers++] = column->validity;
    if (has_offsets(kind)) owned->buffers[buffers++] = column->offsets;
    if (has_text(kind)) owned->buffers[buffers++] = column->text.start;
    if (has_values(kind)) owned->buffers[buffers++] = column->values;
    *array = (struct ArrowArray){
        .length = column->length,
        .null_count = column->validity == NULL ? 0 : -1,
        .n_buffers = buffers,
        .n_children = children,
        .buffers = owned->buffers,
        .children = children > 0 ? owned->children : NULL,
        .release = release,
        .private_data = owned,
    };
    column->validity = column->values = column->text.start = NULL;
    column->offsets = NULL;
    for (int64_t child = 0; child < children; child++) {
        owned->children[child] = calloc(1, sizeof **owned->children);
        if (owned->children[child] == NULL) return false;
        if (!export_column(&column->children[child], owned->children[child])) return false;
    }
    return true;
}

/* All the records. The number of doubtful ones, or NO_MEMORY, or BAD_ARGUMENT. */
static int64_t read_all(struct column *record, const struct values *values, read_row *read, void *reader,
                        const bool *no_memory, int64_t *doubtful) {
    const uint8_t *data = values->data != NULL ? values->data : (const uint8_t *)"";
    int64_t doubts = 0;
    for (int64_t row = 0; row < values->rows; row++) {
        int32_t start = values->offsets[row], end = values->offsets[row + 1];
        if (start < 0 || end < start || end > values->data_length) return BAD_ARGUMENT;
        int64_t good = record->length;
        if (read(reader, data + start, data + end, record)) continue;
        if (*no_memory) return NO_MEMORY;
        avow_truncate_column(record, good);
        doubtful[doubts++] = row;
    }
    return doubts;
}

/* Reads all values into `out`, a struct array of the good ones. Fills `doubtful`, which has room for all rows, with the
 * rows that are not in `out`, ascending, and returns how many they are; or returns NO_MEMORY or BAD_ARGUMENT, and `out`
 * holds nothing. `no_memory` is the reader's own. */
int64_t avow_read_rows(const struct avow_field *fields, int64_t field_count, const struct values *values,
                       read_row *read, void *reader, const bool *no_memory, int64_t *doubtful, struct ArrowArray *out) {
    struct column record = {0};
    int64_t next = 0, rows = values->rows;
    *out = (struct ArrowArray){0};
    if (field_count < 1 || fields[0].kind != STRUCT || rows < 0 || rows > INT32_MAX) return BAD_ARGUMENT;
    if (values->data == NULL && values->data_length != 0) return BAD_ARGUMENT;
    record.field = fields;
    int64_t result = make_column(&record, fields, field_count, &next, rows, 0);
    if (result == 0 && next != field_count) result = BAD_ARGUMENT;
    if (result == 0) result = read_all(&record, values, read, reader, no_memory, doubtful);
    if (result >= 0 && !export_column(&record, out)) {
        if (out->release != NULL) out->release(out);
        result = NO_MEMORY;
    }
    free_column(&record);
    return result;
}
