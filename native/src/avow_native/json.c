/* JSON records into Arrow columns, strictly, driven by the declared columns.
 *
 * The contract is that of every decoder: see columns.h. The strict reader is avow's document.py and values.py.
 *
 * How it works. One pass over each record, no tree and no tokens: the declared columns are a tree (a record is a
 * struct), and each function reads one JSON value straight into the column where it belongs. A function takes the place
 * where its value begins and returns the place behind it, or NULL for doubt. Fields usually come in the same order in
 * every record, so a name is compared with the field that is due next before it is compared with the others.
 *
 * A struct of length n reads its next object: a field was already there if its column has length n + 1 (the second one
 * is a duplicate: doubt), and was absent if it still has length n (null, or doubt if it is declared not null). No other
 * bookkeeping is needed.
 *
 * What is checked, because the strict reader checks it: RFC 8259's grammar, UTF-8 (no overlong forms, no surrogates,
 * nothing beyond U+10FFFF) and escapes (no lone surrogates) in every string, duplicate names, also in what is ignored;
 * ranges of integers; decimals exactly; dates and times by the calendar; base64 in its one spelling.
 *
 * What is left to doubt, because it is rare: a byte order mark, escapes in names of unknown fields and in dates, times,
 * base64 and decimals, objects with many unknown fields or keys of a map, deep nesting in ignored fields, numbers of
 * more than 38 digits, floats of more than 19 digits or with an exponent beyond 27, days next to the years 0 and 10000.
 *
 * Floats are rounded once and correctly. Up to 2^53 and 10^22 a double holds both the digits and the power of ten, and
 * IEEE division or multiplication rounds their quotient or product correctly (Clinger). Beyond, digits times or over a
 * power of five is computed in 128-bit integers, with what the division leaves as a sticky bit, and rounded to even.
 *
 * Bounds. Every read is checked against the end of the record, every write against the capacity of its column. Offsets
 * are 32 bits: they cannot overflow, because what is written for a record is never longer than the record and the
 * records themselves have 32-bit offsets. Recursion is bounded by the depth of the schema and, in ignored fields, by
 * SKIPPED_DEPTH_MAX. The function keeps no state between calls and may run in many threads.
 */

#include <float.h>

#include "columns.h"

enum {
    SKIPPED_DEPTH_MAX = 64,  /* the strict reader allows 1,000 */
    NUMBER_CHARS_MAX = 1000, /* the strict reader allows 1,000 digits */
    UNKNOWN_NAMES_MAX = 128, /* in one record at once; they are compared with one another */
    MAP_KEYS_MAX = 128,
};

enum { REFUSE_NUL = 1, IGNORE_UNKNOWN = 2 };

int64_t avow_json_read(const struct avow_field *fields, int64_t field_count, int32_t rules, const uint8_t *data,
                       int64_t data_length, const int32_t *offsets, int64_t rows, int64_t *doubtful,
                       struct ArrowArray *out);

struct name {
    const uint8_t *start;
    int64_t length;
};

struct reader {
    const uint8_t *end; /* of the record */
    bool refuse_nul;
    bool ignore_unknown;
    bool no_memory;
    int32_t name_count;
    struct name names[UNKNOWN_NAMES_MAX]; /* of the unknown fields of the objects that are open */
    struct bytes scratch;                 /* text that is only checked */
};

/* ---- syntax ----------------------------------------------------------------------------------------------------- */

static inline const uint8_t *skip_space(const uint8_t *at, const uint8_t *end) {
    while (at < end && *at <= ' ' && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) at++;
    return at;
}

static inline bool starts_with(const uint8_t *at, const uint8_t *end, const char *word, ptrdiff_t length) {
    return end - at >= length && memcmp(at, word, (size_t)length) == 0;
}

static inline bool is_digit(uint8_t byte) { return byte >= '0' && byte <= '9'; }

static bool read_hex(const uint8_t *at, const uint8_t *end, uint32_t *unit) {
    if (end - at < 4) return false;
    *unit = 0;
    for (int index = 0; index < 4; index++) {
        uint8_t byte = at[index], letter = byte | 0x20;
        uint32_t digit = is_digit(byte) ? (uint32_t)(byte - '0') : (uint32_t)(letter - 'a' + 10);
        if (!is_digit(byte) && (letter < 'a' || letter > 'f')) return false;
        *unit = *unit * 16 + digit;
    }
    return true;
}

static uint8_t *write_utf8(uint8_t *to, uint32_t character) {
    if (character < 0x80) {
        *to++ = (uint8_t)character;
    } else if (character < 0x800) {
        *to++ = (uint8_t)(0xc0 | character >> 6);
        *to++ = (uint8_t)(0x80 | (character & 0x3f));
    } else if (character < 0x10000) {
        *to++ = (uint8_t)(0xe0 | character >> 12);
        *to++ = (uint8_t)(0x80 | (character >> 6 & 0x3f));
        *to++ = (uint8_t)(0x80 | (character & 0x3f));
    } else {
        *to++ = (uint8_t)(0xf0 | character >> 18);
        *to++ = (uint8_t)(0x80 | (character >> 12 & 0x3f));
        *to++ = (uint8_t)(0x80 | (character >> 6 & 0x3f));
        *to++ = (uint8_t)(0x80 | (character & 0x3f));
    }
    return to;
}

/* What follows a backslash. Never longer as UTF-8 than as an escape. */
static const uint8_t *read_escape(const uint8_t *at, const uint8_t *end, bool refuse_nul, uint8_t **to) {
    if (at == end) return NULL;
    uint32_t unit, second;
    switch (*at) {
    case '"':
    case '\\':
    case '/': *(*to)++ = *at; return at + 1;
    case 'b': *(*to)++ = '\b'; return at + 1;
    case 'f': *(*to)++ = '\f'; return at + 1;
    case 'n': *(*to)++ = '\n'; return at + 1;
    case 'r': *(*to)++ = '\r'; return at + 1;
    case 't': *(*to)++ = '\t'; return at + 1;
    case 'u': break;
    default: return NULL;
    }
    if (!read_hex(++at, end, &unit) || (unit == 0 && refuse_nul) || (unit >= 0xdc00 && unit <= 0xdfff)) return NULL;
    at += 4;
    if (unit >= 0xd800 && unit <= 0xdbff) {
        if (!starts_with(at, end, "\\u", 2) || !read_hex(at + 2, end, &second)) return NULL;
        if (second < 0xdc00 || second > 0xdfff) return NULL;
        unit = 0x10000 + ((unit - 0xd800) << 10) + (second - 0xdc00);
        at += 6;
    }
    *to = write_utf8(*to, unit);
    return at;
}

/* How many of 8 bytes, from the first on, are plain: ASCII, no control character, no quote and no backslash. */
static inline int plain_bytes(uint64_t word) {
    const uint64_t ones = UINT64_C(0x0101010101010101), tops = ones << 7;
    uint64_t quote = word ^ ones * '"', backslash = word ^ ones * '\\';
    /* A borrow can mark a byte by mistake, but only behind one that is marked rightly: the first is right. */
    uint64_t special = ((quote - ones) & ~quote) | ((backslash - ones) & ~backslash);
    uint64_t marks = (special | ((word - ones * ' ') & ~word) | word) & tops;
    return marks == 0 ? 8 : __builtin_ctzll(marks) / 8;
}

static inline uint64_t load_little_endian(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

/* A string, from behind its opening quote to behind its closing one, appended to `text`. */
static const uint8_t *read_text(struct reader *reader, const uint8_t *at, struct bytes *text, bool refuse_nul) {
    const uint8_t *end = reader->end;
    if (!reserve_text(&reader->no_memory, text, end - at)) return NULL;
    uint8_t *to = text->start + text->length;
    for (;;) {
        while (end - at >= 8) {
            int plain = plain_bytes(load_little_endian(at));
            memcpy(to, at, 8);
            at += plain;
            to += plain;
            if (plain < 8) break;
        }
        if (at == end) return NULL;
        uint8_t byte = *at;
        if (byte == '"') break;
        if (byte < ' ') return NULL;
        if (byte == '\\') {
            at = read_escape(at + 1, end, refuse_nul, &to);
            if (at == NULL) return NULL;
        } else if (byte < 0x80) {
            *to++ = byte;
            at++;
        } else {
            int length = utf8_length(at, end);
            if (length == 0) return NULL;
            for (; length > 0; length--) *to++ = *at++;
        }
    }
    text->length = to - text->start;
    return at + 1;
}

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

struct number {
    uint64_t first;   /* the first 19 significant digits, */
    uint64_t second;  /* and the 19 after them */
    int32_t digits;   /* how many significant ones; zeros before the first are not */
    int32_t exponent; /* of ten, for all the digits taken as a whole number */
    bool negative;
    bool is_whole; /* written without fraction and exponent */
    bool is_known; /* all the digits are here, and the exponent */
};

enum { FIRST_DIGITS = 19, EXPONENT_MAX = 9999 };

static inline void add_digit(struct number *number, uint8_t byte) {
    uint64_t digit = byte & 0xf;
    if (number->digits == 0 && digit == 0) return;
    if (number->digits < FIRST_DIGITS)
        number->first = number->first * 10 + digit;
    else if (number->digits < DIGITS_MAX)
        number->second = number->second * 10 + digit;
    else
        number->is_known = false;
    number->digits++;
}

static inline const uint8_t *read_digits(const uint8_t *at, const uint8_t *end, struct number *number) {
    while (at < end && is_digit(*at)) add_digit(number, *at++);
    return at;
}

static const uint8_t *read_exponent(const uint8_t *at, const uint8_t *end, struct number *number) {
    bool negative = at < end && *at == '-';
    int32_t exponent = 0;
    if (at < end && (*at == '-' || *at == '+')) at++;
    if (at == end || !is_digit(*at)) return NULL;
    for (; at < end && is_digit(*at); at++) {
        if (exponent <= EXPONENT_MAX) exponent = exponent * 10 + (*at - '0');
    }
    if (exponent > EXPONENT_MAX) number->is_known = false;
    number->exponent += negative ? -exponent : exponent;
    return at;
}

/* A number, however long, as JSON writes it; or, with `in_text`, as a string may spell a decimal: with a plus, with
 * zeros before it, with no digit on one side of the point. */
static const uint8_t *read_number(const uint8_t *at, const uint8_t *end, bool in_text, struct number *number) {
    const uint8_t *start = at;
    *number = (struct number){.is_whole = true, .is_known = true};
    if (at < end && (*at == '-' || (in_text && *at == '+'))) number->negative = *at++ == '-';
    const uint8_t *whole = at;
    at = read_digits(at, end, number);
    bool has_digits = at > whole;
    if (!in_text && (!has_digits || (*whole == '0' && at - whole > 1))) return NULL;
    if (at < end && *at == '.') {
        const uint8_t *part = ++at;
        at = read_digits(at, end, number);
        if (at == part && !(in_text && has_digits)) return NULL;
        if (at - part > NUMBER_CHARS_MAX) return NULL;
        has_digits = true;
        number->exponent = -(int32_t)(at - part);
        number->is_whole = false;
    }
    if (!has_digits) return NULL;
    if (at < end && (*at == 'e' || *at == 'E')) {
        number->is_whole = false;
        at = read_exponent(at + 1, end, number);
    }
    return at == NULL || at - start > NUMBER_CHARS_MAX ? NULL : at;
}

static const uint8_t *read_integer(const uint8_t *at, const uint8_t *end, struct column *column) {
    struct number number;
    at = read_number(at, end, false, &number);
    if (at == NULL || !number.is_whole || number.digits > FIRST_DIGITS) return NULL;
    int64_t width = width_of(kind_of(column));
    uint64_t limit = UINT64_C(1) << (8 * width - 1);
    if (number.first > limit - (number.negative ? 0 : 1)) return NULL;
    uint64_t bits = number.negative ? 0 - number.first : number.first;
    int8_t as8 = (int8_t)bits;
    int16_t as16 = (int16_t)bits;
    int32_t as32 = (int32_t)bits;
    uint8_t *to = column->values + column->length * width;
    switch (width) {
    case 1: memcpy(to, &as8, 1); break;
    case 2: memcpy(to, &as16, 2); break;
    case 4: memcpy(to, &as32, 4); break;
    default: memcpy(to, &bits, 8); break;
    }
    append(column);
    return at;
}

static int bit_length(uint128 value) {
    uint64_t high = (uint64_t)(value >> 64), low = (uint64_t)value;
    return high != 0 ? 128 - __builtin_clzll(high) : low != 0 ? 64 - __builtin_clzll(low) : 0;
}

/* digits * 10^exponent, not zero, rounded once to `bits` binary digits, ties to even. The exponent is at most
 * FIVES_MAX either way, so that the result, between 10^-27 and 10^47, is a normal double, and exactly one. */
static double round_once(uint64_t digits, int32_t exponent, int bits) {
    uint128 value;
    bool has_rest = false;
    int power = exponent; /* of two: ten is five times two */
    if (exponent >= 0) {
        value = (uint128)digits * FIVES[exponent];
    } else {
        int shift = __builtin_clzll(digits);
        uint128 dividend = (uint128)(digits << shift) << 64; /* the quotient has at least 64 digits */
        value = dividend / FIVES[-exponent];
        has_rest = dividend % FIVES[-exponent] != 0;
        power -= 64 + shift;
    }
    int surplus = bit_length(value) - bits;
    if (surplus > 0) {
        uint128 half = (uint128)1 << (surplus - 1), rest = value & (half * 2 - 1);
        value >>= surplus;
        power += surplus;
        if (rest > half || (rest == half && (has_rest || (value & 1)))) value++;
    }
    uint64_t factor_bits = (uint64_t)(1023 + power) << 52;
    double factor;
    memcpy(&factor, &factor_bits, sizeof factor);
    return (double)(uint64_t)value * factor;
}

static double double_of(const struct number *number) {
#if FLT_EVAL_METHOD == 0
    static const double tens[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                  1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    int32_t exponent = number->exponent;
    if (number->first <= UINT64_C(1) << 53 && exponent >= -22 && exponent <= 22) {
        double digits = (double)number->first;
        return exponent < 0 ? digits / tens[-exponent] : digits * tens[exponent];
    }
#endif
    return round_once(number->first, number->exponent, 53);
}

static double float_of(const struct number *number) {
#if FLT_EVAL_METHOD == 0
    static const float tens[] = {1e0f, 1e1f, 1e2f, 1e3f, 1e4f, 1e5f, 1e6f, 1e7f, 1e8f, 1e9f, 1e10f};
    int32_t exponent = number->exponent;
    if (number->first <= UINT64_C(1) << 24 && exponent >= -10 && exponent <= 10) {
        float digits = (float)number->first;
        return exponent < 0 ? digits / tens[-exponent] : digits * tens[exponent];
    }
#endif
    return round_once(number->first, number->exponent, 24);
}

static const uint8_t *read_float(const uint8_t *at, const uint8_t *end, struct column *column) {
    bool is_double = kind_of(column) == DOUBLE;
    struct number number;
    at = read_number(at, end, false, &number);
    if (at == NULL || !number.is_known || number.digits > FIRST_DIGITS) return NULL;
    double value = 0.0;
    if (number.first != 0) {
        /* A whole number must be held exactly: below this limit all are. */
        if (number.is_whole && number.first > UINT64_C(1) << (is_double ? 53 : 24)) return NULL;
        if (number.exponent < -FIVES_MAX || number.exponent > FIVES_MAX) return NULL;
        value = is_double ? double_of(&number) : float_of(&number);
    }
    if (number.negative) value = -value;
    if (is_double) {
        memcpy(column->values + column->length * 8, &value, 8);
    } else {
        if (value > FLT_MAX || value < -FLT_MAX) return NULL;
        float narrow = (float)value;
        memcpy(column->values + column->length * 4, &narrow, 4);
    }
    append(column);
    return at;
}

/* The number as so many units of 10^-scale, if it is a whole number of them and has no more digits than the type. */
static bool unscaled(const struct number *number, const struct avow_field *type, uint128 *units) {
    *units = number->first;
    if (number->first == 0) return true;
    if (number->digits > FIRST_DIGITS)
        *units = *units * power_of_ten(number->digits - FIRST_DIGITS) + number->second;
    int32_t shift = type->scale + number->exponent;
    if (shift > 0) {
        if (number->digits + shift > DIGITS_MAX) return false;
        *units *= power_of_ten(shift);
    }
    for (; shift < 0; shift++) {
        if (*units % 10 != 0) return false; /* at the latest when a single digit is left */
        *units /= 10;
    }
    return *units < power_of_ten(type->precision);
}

static const uint8_t *read_decimal(const uint8_t *at, const uint8_t *end, struct column *column) {
    struct number number;
    bool in_text = at < end && *at == '"';
    at = read_number(at + in_text, end, in_text, &number);
    if (at == NULL || !number.is_known || (in_text && (at == end || *at != '"'))) return NULL;
    uint128 units;
    if (!unscaled(&number, column->field, &units)) return NULL;
    if (number.negative) units = 0 - units;
    memcpy(column->values + column->length * 16, &units, 16);
    append(column);
    return at + in_text;
}

/* ---- dates and times -------------------------------------------------------------------------------------------- */

static bool read_two(const uint8_t *at, int *value) {
    *value = (at[0] - '0') * 10 + (at[1] - '0');
    return is_digit(at[0]) && is_digit(at[1]);
}

/* Days from 1970-01-01 on, in the calendar that has always been in force. */
static int64_t days_from_civil(int year, int month, int day) {
    static const int before[] = {0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334};
    int64_t past = year - 1; /* whole years before this one, from year 1 on */
    bool is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    int64_t days = past * 365 + past / 4 - past / 100 + past / 400 + before[month - 1] + (month > 2 && is_leap);
    return days + day - 1 - 719162; /* the days from 0001-01-01 to 1970-01-01 */
}

static bool is_day(int year, int month, int day) {
    static const int lengths[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    if (year < 1 || month < 1 || month > 12 || day < 1) return false;
    bool is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    return day <= lengths[month - 1] + (month == 2 && is_leap);
}

/* 2026-01-31: ten bytes. */
static const uint8_t *read_day(const uint8_t *at, const uint8_t *end, int64_t *days) {
    int century, year, month, day;
    if (end - at < 10 || !read_two(at, &century) || !read_two(at + 2, &year) || at[4] != '-') return NULL;
    if (!read_two(at + 5, &month) || at[7] != '-' || !read_two(at + 8, &day)) return NULL;
    year += century * 100;
    if (!is_day(year, month, day)) return NULL;
    *days = days_from_civil(year, month, day);
    return at + 10;
}

/* 23:59: five bytes. */
static const uint8_t *read_clock(const uint8_t *at, const uint8_t *end, int64_t *minutes) {
    int hour, minute;
    if (end - at < 5 || !read_two(at, &hour) || at[2] != ':' || !read_two(at + 3, &minute)) return NULL;
    if (hour > 23 || minute > 59) return NULL;
    *minutes = hour * 60 + minute;
    return at + 5;
}

/* .123456, or nothing: at most microseconds, and zeros behind them. */
static const uint8_t *read_fraction(const uint8_t *at, const uint8_t *end, int64_t *micros) {
    *micros = 0;
    if (at == end || *at != '.') return at;
    const uint8_t *first = ++at;
    int64_t unit = 100000;
    for (; at < end && is_digit(*at); at++) {
        if (unit == 0 && *at != '0') return NULL;
        *micros += (*at - '0') * unit;
        unit /= 10;
    }
    return at == first ? NULL : at;
}

static const uint8_t *read_zone(const uint8_t *at, const uint8_t *end, int64_t *minutes) {
    *minutes = 0;
    if (at == end) return NULL;
    uint8_t sign = *at++;
    if (sign == 'Z' || sign == 'z') return at;
    if (sign != '+' && sign != '-') return NULL;
    at = read_clock(at, end, minutes);
    if (sign == '-') *minutes = -*minutes;
    return at;
}

/* Next to the ends of the calendar a zone can lead out of it: the strict reader decides there. */
static const int64_t DAYS_MIN = -719161, DAYS_MAX = 2932895; /* 0001-01-02, 9999-12-30 */

static const uint8_t *read_date(const uint8_t *at, const uint8_t *end, struct column *column) {
    int64_t days;
    if (at == end || *at != '"') return NULL;
    at = read_day(at + 1, end, &days);
    if (at == NULL || at == end || *at != '"' || days < DAYS_MIN || days > DAYS_MAX) return NULL;
    int32_t narrow = (int32_t)days;
    memcpy(column->values + column->length * 4, &narrow, 4);
    append(column);
    return at + 1;
}

static const uint8_t *read_timestamp(const uint8_t *at, const uint8_t *end, struct column *column) {
    int64_t days, minutes, micros, zone = 0;
    int second;
    if (at == end || *at != '"') return NULL;
    at = read_day(at + 1, end, &days);
    if (at == NULL || days < DAYS_MIN || days > DAYS_MAX || at == end || (*at != 'T' && *at != 't')) return NULL;
    at = read_clock(at + 1, end, &minutes);
    if (at == NULL || end - at < 3 || *at != ':' || !read_two(at + 1, &second) || second > 59) return NULL;
    at = read_fraction(at + 3, end, &micros);
    if (at != NULL && kind_of(column) == TIMESTAMP) at = read_zone(at, end, &zone);
    if (at == NULL || at == end || *at != '"') return NULL;
    int64_t value = ((days * 1440 + minutes - zone) * 60 + second) * 1000000 + micros;
    memcpy(column->values + column->length * 8, &value, 8);
    append(column);
    return at + 1;
}

/* ---- text ------------------------------------------------------------------------------------------------------- */

static const uint8_t *read_string(struct reader *reader, const uint8_t *at, struct column *column) {
    if (at == reader->end || *at != '"') return NULL;
    at = read_text(reader, at + 1, &column->text, reader->refuse_nul);
    if (at == NULL || column->text.length > INT32_MAX) return NULL;
    column->offsets[column->length + 1] = (int32_t)column->text.length;
    append(column);
    return at;
}

static int base64_digit(uint8_t byte) {
    if (byte >= 'A' && byte <= 'Z') return byte - 'A';
    if (byte >= 'a' && byte <= 'z') return byte - 'a' + 26;
    if (is_digit(byte)) return byte - '0' + 52;
    return byte == '+' ? 62 : byte == '/' ? 63 : -1;
}

/* Four characters as up to three bytes; how many, or 0 for doubt. Bits that stand for nothing must be zero. */
static int read_quantum(const uint8_t *at, uint8_t *to) {
    int padding = at[3] != '=' ? 0 : at[2] != '=' ? 1 : 2;
    int32_t bits = 0;
    for (int index = 0; index < 4; index++) {
        int digit = index < 4 - padding ? base64_digit(at[index]) : 0;
        if (digit < 0) return 0;
        bits = bits << 6 | digit;
    }
    if ((padding == 1 && (bits & 0xff) != 0) || (padding == 2 && (bits & 0xffff) != 0)) return 0;
    to[0] = (uint8_t)(bits >> 16);
    to[1] = (uint8_t)(bits >> 8);
    to[2] = (uint8_t)bits;
    return 3 - padding;
}

static const uint8_t *read_binary(struct reader *reader, const uint8_t *at, struct column *column) {
    if (at == reader->end || *at++ != '"') return NULL;
    if (!reserve_text(&reader->no_memory, &column->text, reader->end - at)) return NULL;
    int written = 3;
    while (reader->end - at >= 4 && *at != '"') {
        if (written < 3) return NULL; /* padding ends it */
        written = read_quantum(at, column->text.start + column->text.length);
        if (written == 0) return NULL;
        column->text.length += written;
        at += 4;
    }
    if (at == reader->end || *at != '"' || column->text.length > INT32_MAX) return NULL;
    column->offsets[column->length + 1] = (int32_t)column->text.length;
    append(column);
    return at + 1;
}

/* ---- what is ignored -------------------------------------------------------------------------------------------- */

static const uint8_t *skip_value(struct reader *reader, const uint8_t *at, int depth);

static const uint8_t *skip_text(struct reader *reader, const uint8_t *at) {
    reader->scratch.length = 0;
    return read_text(reader, at, &reader->scratch, false);
}

/* The name of an unknown field, from behind its opening quote. It must be another one than the unknown fields of this
 * object before it, which begin at `first`; the caller has compared it with the declared ones. */
static const uint8_t *skip_name(struct reader *reader, const uint8_t *at, int32_t first) {
    const uint8_t *start = at;
    at = skip_text(reader, at);
    if (at == NULL || reader->name_count == UNKNOWN_NAMES_MAX) return NULL;
    struct name name = {start, at - 1 - start};
    if (reader->scratch.length != name.length) return NULL; /* escapes: it may be the same as another */
    for (int32_t index = first; index < reader->name_count; index++) {
        const struct name *other = &reader->names[index];
        if (other->length == name.length && memcmp(other->start, name.start, (size_t)name.length) == 0) return NULL;
    }
    reader->names[reader->name_count++] = name;
    return at;
}

/* From a name to the value that belongs to it. */
static inline const uint8_t *skip_colon(const uint8_t *at, const uint8_t *end) {
    at = skip_space(at, end);
    return at == end || *at != ':' ? NULL : skip_space(at + 1, end);
}

static const uint8_t *skip_object(struct reader *reader, const uint8_t *at, int depth) {
    const uint8_t *end = reader->end;
    int32_t first = reader->name_count;
    at = skip_space(at, end);
    if (at < end && *at == '}') return at + 1;
    for (;;) {
        if (at == end || *at != '"') return NULL;
        at = skip_name(reader, at + 1, first);
        if (at != NULL) at = skip_colon(at, end);
        if (at != NULL) at = skip_value(reader, at, depth);
        if (at == NULL) return NULL;
        at = skip_space(at, end);
        if (at == end || (*at != ',' && *at != '}')) return NULL;
        if (*at++ == '}') break;
        at = skip_space(at, end);
    }
    reader->name_count = first;
    return at;
}

static const uint8_t *skip_array(struct reader *reader, const uint8_t *at, int depth) {
    const uint8_t *end = reader->end;
    at = skip_space(at, end);
    if (at < end && *at == ']') return at + 1;
    for (;;) {
        at = skip_value(reader, at, depth);
        if (at == NULL) return NULL;
        at = skip_space(at, end);
        if (at == end || (*at != ',' && *at != ']')) return NULL;
        if (*at++ == ']') return at;
        at = skip_space(at, end);
    }
}

static const uint8_t *skip_value(struct reader *reader, const uint8_t *at, int depth) {
    const uint8_t *end = reader->end;
    struct number number;
    if (at == end || depth == SKIPPED_DEPTH_MAX) return NULL;
    switch (*at) {
    case '{': return skip_object(reader, at + 1, depth + 1);
    case '[': return skip_array(reader, at + 1, depth + 1);
    case '"': return skip_text(reader, at + 1);
    case 't': return starts_with(at, end, "true", 4) ? at + 4 : NULL;
    case 'f': return starts_with(at, end, "false", 5) ? at + 5 : NULL;
    case 'n': return starts_with(at, end, "null", 4) ? at + 4 : NULL;
    default: return read_number(at, end, false, &number);
    }
}

/* ---- values ----------------------------------------------------------------------------------------------------- */

static const uint8_t *read_value(struct reader *reader, const uint8_t *at, struct column *column);

static const uint8_t *read_boolean(const uint8_t *at, const uint8_t *end, struct column *column) {
    bool is_true = starts_with(at, end, "true", 4);
    if (!is_true && !starts_with(at, end, "false", 5)) return NULL;
    set_last_bit(column->values, column->length, is_true);
    append(column);
    return at + (is_true ? 4 : 5);
}

static const uint8_t *read_list(struct reader *reader, const uint8_t *at, struct column *column) {
    const uint8_t *end = reader->end;
    struct column *elements = &column->children[0];
    if (at == end || *at != '[') return NULL;
    at = skip_space(at + 1, end);
    if (at < end && *at == ']') {
        at++;
    } else {
        for (;;) {
            at = read_value(reader, at, elements);
            if (at == NULL) return NULL;
            at = skip_space(at, end);
            if (at == end || (*at != ',' && *at != ']')) return NULL;
            if (*at++ == ']') break;
            at = skip_space(at, end);
        }
    }
    if (elements->length > INT32_MAX) return NULL;
    column->offsets[column->length + 1] = (int32_t)elements->length;
    append(column);
    return at;
}

/* Whether the last key is among those before it, from `first` on. */
static bool is_duplicate_key(const struct column *keys, int64_t first) {
    int64_t last = keys->length - 1;
    int32_t start = keys->offsets[last], length = keys->offsets[last + 1] - start;
    for (int64_t index = first; index < last; index++) {
        int32_t other = keys->offsets[index];
        if (keys->offsets[index + 1] - other != length) continue;
        if (memcmp(keys->text.start + other, keys->text.start + start, (size_t)length) == 0) return true;
    }
    return false;
}

static const uint8_t *read_entry(struct reader *reader, const uint8_t *at, struct column *entries, int64_t first) {
    struct column *keys = &entries->children[0];
    if (!reserve(&reader->no_memory, entries) || !reserve(&reader->no_memory, keys)) return NULL;
    at = read_string(reader, at, keys);
    if (at == NULL || keys->length - first > MAP_KEYS_MAX || is_duplicate_key(keys, first)) return NULL;
    at = skip_colon(at, reader->end);
    if (at != NULL) at = read_value(reader, at, &entries->children[1]);
    if (at != NULL) append(entries);
    return at;
}

static const uint8_t *read_map(struct reader *reader, const uint8_t *at, struct column *column) {
    const uint8_t *end = reader->end;
    struct column *entries = &column->children[0];
    int64_t first = entries->length;
    if (at == end || *at != '{') return NULL;
    at = skip_space(at + 1, end);
    if (at < end && *at == '}') {
        at++;
    } else {
        for (;;) {
            at = read_entry(reader, at, entries, first);
            if (at == NULL) return NULL;
            at = skip_space(at, end);
            if (at == end || (*at != ',' && *at != '}')) return NULL;
            if (*at++ == '}') break;
            at = skip_space(at, end);
        }
    }
    if (entries->length > INT32_MAX) return NULL;
    column->offsets[column->length + 1] = (int32_t)entries->length;
    append(column);
    return at;
}

static inline bool is_named(const struct column *column, const uint8_t *at, const uint8_t *end) {
    const struct avow_field *field = column->field;
    return end - at > field->name_length && at[field->name_length] == '"' &&
           memcmp(at, field->name, (size_t)field->name_length) == 0;
}

/* The field whose name begins here, behind the opening quote. `due` is the one to try first, and becomes the next. */
static inline struct column *find_field(struct column *column, const uint8_t *at, const uint8_t *end, int32_t *due) {
    int32_t count = column->field->child_count, index = *due;
    for (int32_t tried = 0; tried < count; tried++, index++) {
        if (index >= count) index = 0;
        if (is_named(&column->children[index], at, end)) {
            *due = index + 1;
            return &column->children[index];
        }
    }
    return NULL;
}

/* One field of an object, from behind its name's opening quote. `unknown`: where this object's unknown names begin. */
static const uint8_t *read_field(struct reader *reader, const uint8_t *at, struct column *column, int32_t *due,
                                 int32_t unknown) {
    struct column *field = find_field(column, at, reader->end, due);
    if (field == NULL) {
        if (!reader->ignore_unknown) return NULL;
        at = skip_name(reader, at, unknown);
        if (at != NULL) at = skip_colon(at, reader->end);
        return at == NULL ? NULL : skip_value(reader, at, 0);
    }
    if (field->length != column->length) return NULL; /* a duplicate */
    at = skip_colon(at + field->field->name_length + 1, reader->end);
    return at == NULL ? NULL : read_value(reader, at, field);
}

static bool append_absent(struct reader *reader, struct column *column) {
    for (int32_t index = 0; index < column->field->child_count; index++) {
        struct column *field = &column->children[index];
        if (field->length == column->length &&
            (field->field->required || !avow_append_null(&reader->no_memory, field)))
            return false;
    }
    return true;
}

static const uint8_t *read_struct(struct reader *reader, const uint8_t *at, struct column *column) {
    const uint8_t *end = reader->end;
    int32_t due = 0, unknown = reader->name_count;
    if (at == end || *at != '{') return NULL;
    at = skip_space(at + 1, end);
    if (at < end && *at == '}') {
        at++;
    } else {
        for (;;) {
            if (at == end || *at != '"') return NULL;
            at = read_field(reader, at + 1, column, &due, unknown);
            if (at == NULL) return NULL;
            at = skip_space(at, end);
            if (at == end || (*at != ',' && *at != '}')) return NULL;
            if (*at++ == '}') break;
            at = skip_space(at, end);
        }
    }
    reader->name_count = unknown;
    if (!append_absent(reader, column)) return NULL;
    append(column);
    return at;
}

/* One value, or null, at the end of the column. */
static const uint8_t *read_value(struct reader *reader, const uint8_t *at, struct column *column) {
    const uint8_t *end = reader->end;
    if (at < end && *at == 'n') {
        if (!starts_with(at, end, "null", 4) || column->field->required) return NULL;
        return avow_append_null(&reader->no_memory, column) ? at + 4 : NULL;
    }
    if (!reserve(&reader->no_memory, column)) return NULL;
    switch (kind_of(column)) {
    case BOOLEAN: return read_boolean(at, end, column);
    case INT8:
    case INT16:
    case INT32:
    case INT64: return read_integer(at, end, column);
    case FLOAT:
    case DOUBLE: return read_float(at, end, column);
    case DECIMAL: return read_decimal(at, end, column);
    case STRING: return read_string(reader, at, column);
    case BINARY: return read_binary(reader, at, column);
    case DATE: return read_date(at, end, column);
    case TIMESTAMP:
    case TIMESTAMP_NTZ: return read_timestamp(at, end, column);
    case LIST: return read_list(reader, at, column);
    case MAP: return read_map(reader, at, column);
    case STRUCT: return read_struct(reader, at, column);
    case KINDS: break;
    }
    return NULL;
}

static bool read_record(void *state, const uint8_t *start, const uint8_t *end, struct column *record) {
    struct reader *reader = state;
    reader->end = end;
    reader->name_count = 0;
    if (!reserve(&reader->no_memory, record)) return false;
    const uint8_t *at = read_struct(reader, skip_space(start, end), record);
    return at != NULL && skip_space(at, end) == end;
}

/* See avow_read_rows. */
int64_t avow_json_read(const struct avow_field *fields, int64_t field_count, int32_t rules, const uint8_t *data,
                       int64_t data_length, const int32_t *offsets, int64_t rows, int64_t *doubtful,
                       struct ArrowArray *out) {
    struct reader reader = {.refuse_nul = rules & REFUSE_NUL, .ignore_unknown = rules & IGNORE_UNKNOWN};
    struct values values = {data, data_length, offsets, rows};
    for (int64_t field = 0; field < field_count; field++) {
        if (fields[field].name_length < 0) return BAD_ARGUMENT;
        if (memchr(fields[field].name, '"', (size_t)fields[field].name_length) != NULL) return BAD_ARGUMENT;
        if (memchr(fields[field].name, '\\', (size_t)fields[field].name_length) != NULL) return BAD_ARGUMENT;
    }
    int64_t result =
        avow_read_rows(fields, field_count, &values, read_record, &reader, &reader.no_memory, doubtful, out);
    free(reader.scratch.start);
    return result;
}
