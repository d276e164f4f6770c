#include "placement/lines.h"

#include "base/size.h"
#include "os/random.h"

#define MIN_LINE_BYTES 64   /* the alignment of large blocks */
#define MIN_WAY_BYTES  4096 /* a CPU compares loads with older stores by the address modulo this number */

struct line_spread line_spread_for(size_t page_bytes, size_t line_bytes, size_t way_bytes) {
    size_t spread = size_min(size_max(way_bytes, MIN_WAY_BYTES), page_bytes);
    return (struct line_spread){size_min(size_max(line_bytes, MIN_LINE_BYTES), spread), spread};
}

static uint64_t mixed(uint64_t number) {
    return random_mix(number + RANDOM_GOLDEN_RATIO);
}

size_t line_offset(const struct line_spread *spread, bool evenly, uint64_t turn, uint64_t seed,
                   size_t room_bytes, size_t alignment) {
    size_t unit = size_max(alignment, spread->line_bytes);
    uint64_t places = size_min(room_bytes, spread->spread_bytes - 1) / unit + 1;
    /* The fractions lie on a circle. A rotation by the seed keeps every
     * distance. */
    uint64_t fraction = evenly ? turn * RANDOM_GOLDEN_RATIO + seed : mixed(turn ^ mixed(seed));
    return (size_t)((unsigned __int128)fraction * places >> 64) * unit;
}
