/* What the parts of avow-native share: Arrow's C data interface, as Arrow's documentation spells it.
 *
 * https://arrow.apache.org/docs/format/CDataInterface.html: whoever is given an array calls its release callback once,
 * which frees everything that belongs to it, children that were not moved away included.
 */
#ifndef AVOW_NATIVE_H
#define AVOW_NATIVE_H

#include <stdint.h>

#ifndef ARROW_C_DATA_INTERFACE
#define ARROW_C_DATA_INTERFACE

struct ArrowArray {
    int64_t length;
    int64_t null_count; /* -1: not counted */
    int64_t offset;
    int64_t n_buffers;
    int64_t n_children;
    const void **buffers;
    struct ArrowArray **children;
    struct ArrowArray *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};

#endif
#endif
