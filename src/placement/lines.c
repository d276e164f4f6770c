#include "placement/lines.h"

#include "os/mix.h"

#define LINE_BYTES_LEAST 64   /* large blocks are promised to be aligned to it */
#define WAY_BYTES_ELSE   4096 /* also how much of an address tells a load from an older store */

struct line_spread line_spread_for(size_t page_bytes, size_t line_bytes, size_t way_bytes) {
    struct line_spread spread = {line_bytes < LINE_BYTES_LEAST ? LINE_BYTES_LEAST : line_bytes,
                                 way_bytes < WAY_BYTES_ELSE ? WAY_BYTES_ELSE : way_bytes};
    if (spread.spread_bytes > page_bytes) {
        spread.spread_bytes = page_bytes;
    }
    if (spread.line_bytes > spread.spread_bytes) {
        spread.line_bytes = spread.spread_bytes;
    }
    return spread;
}

/* 2^64 by the golden ratio: multiples of it, as fractions of 2^64, keep apart best, however many follow each
 * other (Sos, 1958: of n in a row the nearest two are more than 0.38 / n apart). */
#define GOLDEN 0x9e3779b97f4a7c15ULL

static uint64_t mixed(uint64_t number) {
    return os_mixed(number + OS_MIX_STEP);
}

size_t line_offset(const struct line_spread *spread, bool evenly, uint64_t turn, uint64_t seed,
                   size_t room_bytes, size_t alignment) {
    size_t unit = alignment > spread->line_bytes ? alignment : spread->line_bytes;
    size_t room = room_bytes < spread->spread_bytes - 1 ? room_bytes : spread->spread_bytes - 1;
    uint64_t places = room / unit + 1;
    /* A turn of the whole circle by the seed keeps every distance on it. */
    uint64_t fraction = evenly ? turn * GOLDEN + seed : mixed(turn ^ mixed(seed));
    return (size_t)((unsigned __int128)fraction * places >> 64) * unit;
}
