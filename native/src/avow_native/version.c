/* Which sources and which compiler made this library. avow_native.load() refuses one that other sources made. */

#ifndef AVOW_NATIVE_SOURCES
#define AVOW_NATIVE_SOURCES ""
#endif
#ifndef AVOW_NATIVE_COMPILER
#define AVOW_NATIVE_COMPILER ""
#endif

const char *avow_native_sources(void);
const char *avow_native_compiler(void);

const char *avow_native_sources(void) { return AVOW_NATIVE_SOURCES; }

const char *avow_native_compiler(void) { return AVOW_NATIVE_COMPILER; }
