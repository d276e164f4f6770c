/* A stand-in for dedup of the PARSEC suite: compression that stores each chunk of a stream once.
 *
 * Kept: a pipeline of five stages connected by queues, of which the middle three have a pool of threads
 * each. The first reads the stream in large blocks and cuts these into pieces; the second cuts pieces by a
 * rolling hash of the content, into chunks of 4 KiB on average; the third looks each chunk up in a hash
 * table; the fourth compresses new chunks; the fifth restores the order. Most buffers are thus allocated in
 * one thread and freed in another; output starts in a buffer of the maximum size and is shrunk; and each
 * chunk's compressor allocates and frees 256 KiB of working memory, the amount that zlib's manual states for
 * deflate. This makes a thread's arena grow and shrink repeatedly while the total hardly changes: the arena
 * imbalance that the Ptlbmalloc2 paper (section 7.1) blames for dedup's many TLB shootdowns. Blocks are
 * larger than 32 MiB, so glibc does not learn from them to trim less; with --block 16, it does. Left out:
 * files (the stream is generated, with repeats), SHA-1 and zlib's code (a hash of 128 bits and a small
 * Lempel-Ziv coder replace them), and several queues between two stages. After: Bienia et al., "The PARSEC
 * Benchmark Suite: Characterization and Architectural Implications" (2008), the section on dedup. Written
 * from that description; shares no code with the program. */
#include "support.h"

#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char program_name[] = "dedup-like";

enum {
    WORDS = 256, /* the vocabulary of the stream */
    WORD_BYTES = 8,
    LEAST_SEGMENT = 1 << 12, /* what is new or a repeat as a whole */
    MOST_SEGMENT = 1 << 17,
    MEMORY_OF_SEGMENTS = 4096, /* the latest ones are what is repeated */
    LEAST_CHUNK = 512,
    BUCKETS = 1 << 16,
    LOCKS = 256,
    WINDOW = 1 << 16,
    STRETCH = 1 << 15, /* that is compressed by itself: then its output fits pending, whatever it is */
    HASH_BITS = 15,
    NOWHERE = 0xffff,
    LEAST_MATCH = 8,
    MOST_MATCH = 255,
};

/* A bounded queue of pointers between two stages; it ends when its last producer has left. */
struct queue {
    pthread_mutex_t lock;
    pthread_cond_t not_empty;
    pthread_cond_t not_full;
    void **ring;
    size_t capacity;
    size_t first;
    size_t count;
    unsigned long producers;
};

/* One chunk that the stream holds at least once. */
struct entry {
    struct entry *next;
    uint64_t key[2];
    unsigned char *output; /* compressed; only the last stage looks at what follows */
    size_t output_bytes;
    uint64_t number; /* of the chunk in the output */
    bool arrived;
    bool written;
};

/* What the stream is read into: freed with its last piece. */
struct block {
    atomic_ulong users;
    unsigned char bytes[];
};

/* What the first stage hands on. */
struct piece {
    struct block *block;
    unsigned char *bytes; /* in it */
    size_t size;
    unsigned long number;
};

struct chunk {
    unsigned char *bytes; /* NULL once its content is not needed */
    size_t size;
    unsigned long piece;
    unsigned long index; /* in its piece */
    bool last;           /* of its piece */
    struct entry *entry;
    unsigned char *output; /* of the one that brought the entry */
    size_t output_bytes;
};

/* The chunks of a piece that have come to the last stage. */
struct waiting {
    struct chunk **chunks;
    size_t room;
};

struct pipeline {
    unsigned long bytes;
    unsigned long block_bytes;
    unsigned long piece_bytes;
    unsigned long chunk_mask;
    unsigned long repeats;
    struct queue pieces;
    struct queue chunks;
    struct queue unique;
    struct queue done;
    unsigned char words[WORDS][WORD_BYTES];
    uint64_t gear[256];
    struct entry **buckets;
    pthread_mutex_t locks[LOCKS];
    /* Of the last stage. */
    unsigned long long checksum;
    unsigned long total;
    unsigned long stored;
    unsigned long output_bytes;
};

static unsigned long least_of(unsigned long a, unsigned long b) {
    return a < b ? a : b;
}

static void queue_init(struct queue *queue, size_t capacity, unsigned long producers) {
    *queue = (struct queue){
        .lock = PTHREAD_MUTEX_INITIALIZER,
        .not_empty = PTHREAD_COND_INITIALIZER,
        .not_full = PTHREAD_COND_INITIALIZER,
        .ring = checked(calloc(capacity, sizeof(void *)), program_name),
        .capacity = capacity,
        .producers = producers,
    };
}

static void queue_push(struct queue *queue, void *item) {
    (void)pthread_mutex_lock(&queue->lock);
    while (queue->count == queue->capacity) {
        (void)pthread_cond_wait(&queue->not_full, &queue->lock);
    }
    queue->ring[(queue->first + queue->count++) % queue->capacity] = item;
    (void)pthread_cond_signal(&queue->not_empty);
    (void)pthread_mutex_unlock(&queue->lock);
}

/* NULL when no more will come. */
static void *queue_pop(struct queue *queue) {
    (void)pthread_mutex_lock(&queue->lock);
    while (queue->count == 0 && queue->producers > 0) {
        (void)pthread_cond_wait(&queue->not_empty, &queue->lock);
    }
    void *item = NULL;
    if (queue->count > 0) {
        item = queue->ring[queue->first];
        queue->first = (queue->first + 1) % queue->capacity;
        queue->count--;
        (void)pthread_cond_signal(&queue->not_full);
    }
    (void)pthread_mutex_unlock(&queue->lock);
    return item;
}

static void queue_leave(struct queue *queue) {
    (void)pthread_mutex_lock(&queue->lock);
    queue->producers--;
    (void)pthread_cond_broadcast(&queue->not_empty);
    (void)pthread_mutex_unlock(&queue->lock);
}

/* The stream: segments of words, of which some come again as they were. */
struct source {
    const struct pipeline *pipeline;
    unsigned long long random;
    uint64_t seeds[MEMORY_OF_SEGMENTS];
    unsigned long segments;
    unsigned long long content; /* the state of the present segment's own generator */
    size_t left;                /* bytes of it */
};

static void next_segment(struct source *source) {
    uint64_t seed = random_next(&source->random);
    unsigned long known =
        source->segments < MEMORY_OF_SEGMENTS ? source->segments : (unsigned long)MEMORY_OF_SEGMENTS;
    if (known > 0 && random_next(&source->random) % 100 < source->pipeline->repeats) {
        seed = source->seeds[random_next(&source->random) % known];
    } else {
        source->seeds[source->segments++ % MEMORY_OF_SEGMENTS] = seed;
    }
    source->content = seed;
    source->left = random_between(&source->content, LEAST_SEGMENT, MOST_SEGMENT) / WORD_BYTES * WORD_BYTES;
}

static void generate(struct source *source, unsigned char *bytes, size_t size) {
    for (size_t at = 0; at < size;) {
        if (source->left == 0) {
            next_segment(source);
        }
        unsigned long long eight = random_next(&source->content);
        for (int i = 0; i < 8 && at < size && source->left > 0; i++) {
            memcpy(bytes + at, source->pipeline->words[eight & (WORDS - 1)], WORD_BYTES);
            at += WORD_BYTES;
            source->left -= WORD_BYTES;
            eight >>= 8;
        }
    }
}

static void drop_block(struct block *block) {
    if (atomic_fetch_sub(&block->users, 1) == 1) {
        free(block);
    }
}

static void cut_coarsely(struct pipeline *pipeline) {
    struct source *source = checked(calloc(1, sizeof *source), program_name);
    source->pipeline = pipeline;
    unsigned long number = 0;
    for (unsigned long left = pipeline->bytes; left > 0;) {
        size_t size = least_of(left, pipeline->block_bytes);
        struct block *block = checked(malloc(sizeof *block + size), program_name);
        /* This stage is a user too, until all of the block is cut. */
        atomic_init(&block->users, 1);
        generate(source, block->bytes, size);
        for (size_t at = 0; at < size;) {
            struct piece *piece = checked(malloc(sizeof *piece), program_name);
            size_t most = pipeline->piece_bytes / 2 * 3;
            *piece = (struct piece){
                .block = block,
                .bytes = block->bytes + at,
                .size = least_of(random_between(&source->random, most / 3, most), size - at),
                .number = number++,
            };
            at += piece->size;
            atomic_fetch_add(&block->users, 1);
            queue_push(&pipeline->pieces, piece);
        }
        drop_block(block);
        left -= size;
    }
    free(source);
    queue_leave(&pipeline->pieces);
}

/* Where the chunk that begins here ends: where the bits of a rolling hash that the mask has are all 0. */
static size_t chunk_size(const struct pipeline *pipeline, const unsigned char *bytes, size_t size) {
    size_t most = 16 * (pipeline->chunk_mask + 1);
    uint64_t hash = 0;
    for (size_t at = 0; at < size; at++) {
        hash = (hash << 1) + pipeline->gear[bytes[at]];
        if (at >= LEAST_CHUNK && (((hash >> 32) & pipeline->chunk_mask) == 0 || at + 1 == most)) {
            return at + 1;
        }
    }
    return size;
}

static void cut_finely(struct pipeline *pipeline) {
    struct piece *piece;
    while ((piece = queue_pop(&pipeline->pieces)) != NULL) {
        size_t at = 0;
        for (unsigned long index = 0; at < piece->size; index++) {
            struct chunk *chunk = checked(calloc(1, sizeof *chunk), program_name);
            chunk->size = chunk_size(pipeline, piece->bytes + at, piece->size - at);
            chunk->bytes = checked(malloc(chunk->size), program_name);
            memcpy(chunk->bytes, piece->bytes + at, chunk->size);
            at += chunk->size;
            chunk->piece = piece->number;
            chunk->index = index;
            chunk->last = at == piece->size;
            queue_push(&pipeline->chunks, chunk);
        }
        drop_block(piece->block);
        free(piece);
    }
    queue_leave(&pipeline->chunks);
}

static void hash_content(const unsigned char *bytes, size_t size, uint64_t key[2]) {
    uint64_t a = 0x243f6a8885a308d3ULL ^ size;
    uint64_t b = 0x13198a2e03707344ULL;
    for (size_t at = 0; at < size; at += 8) {
        uint64_t word = 0;
        memcpy(&word, bytes + at, size - at < 8 ? size - at : 8);
        a = (a ^ word) * 0xff51afd7ed558ccdULL;
        a ^= a >> 32;
        b = (b + word) * 0xc4ceb9fe1a85ec53ULL;
        b ^= b >> 29;
    }
    key[0] = a;
    key[1] = b;
}

/* Tells whether the chunk is the first of its content, and has made the entry. */
static bool look_up(struct pipeline *pipeline, struct chunk *chunk) {
    uint64_t key[2];
    hash_content(chunk->bytes, chunk->size, key);
    size_t bucket = key[0] % BUCKETS;
    pthread_mutex_t *lock = &pipeline->locks[bucket % LOCKS];
    (void)pthread_mutex_lock(lock);
    struct entry *entry = pipeline->buckets[bucket];
    while (entry != NULL && (entry->key[0] != key[0] || entry->key[1] != key[1])) {
        entry = entry->next;
    }
    bool first = entry == NULL;
    if (first) {
        entry = checked(calloc(1, sizeof *entry), program_name);
        entry->key[0] = key[0];
        entry->key[1] = key[1];
        entry->next = pipeline->buckets[bucket];
        pipeline->buckets[bucket] = entry;
    }
    (void)pthread_mutex_unlock(lock);
    chunk->entry = entry;
    return first;
}

static void deduplicate(struct pipeline *pipeline) {
    struct chunk *chunk;
    while ((chunk = queue_pop(&pipeline->chunks)) != NULL) {
        if (look_up(pipeline, chunk)) {
            queue_push(&pipeline->unique, chunk);
        } else {
            free(chunk->bytes);
            chunk->bytes = NULL;
            queue_push(&pipeline->done, chunk);
        }
    }
    queue_leave(&pipeline->unique);
    queue_leave(&pipeline->done);
}

/* What a compressor works with, made anew for each chunk and of zlib's sizes: 256 KiB in four blocks. */
struct coder {
    unsigned char *window; /* WINDOW bytes: what is being compressed */
    uint16_t *previous;    /* WINDOW / 2 places, by a place's remainder: the one before it of the same hash */
    uint16_t *head;        /* 1 << HASH_BITS places, by hash */
    unsigned char *pending; /* WINDOW bytes: output that is not yet in its buffer */
};

static struct coder coder_init(void) {
    struct coder coder = {.window = checked(malloc(WINDOW), program_name)};
    coder.previous = checked(malloc(WINDOW / 2 * sizeof(uint16_t)), program_name);
    coder.head = checked(malloc((1 << HASH_BITS) * sizeof(uint16_t)), program_name);
    coder.pending = checked(malloc(WINDOW), program_name);
    return coder;
}

static void coder_end(struct coder *coder) {
    free(coder->pending);
    free(coder->head);
    free(coder->previous);
    free(coder->window);
}

/* The longest match with the few latest places of the same hash; notes this place as one more. */
static size_t find_match(struct coder *coder, size_t at, size_t size, size_t *distance) {
    if (at + LEAST_MATCH > size) {
        return 0;
    }
    const unsigned char *window = coder->window;
    uint64_t word;
    memcpy(&word, window + at, sizeof word);
    uint16_t *head = &coder->head[(word * 0x9e3779b97f4a7c15ULL) >> (64 - HASH_BITS)];
    size_t best = 0;
    size_t place = *head;
    for (int tries = 0; tries < 4 && place != NOWHERE && at - place < WINDOW / 2; tries++) {
        size_t length = 0;
        while (length < MOST_MATCH && at + length < size && window[place + length] == window[at + length]) {
            length++;
        }
        if (length > best) {
            best = length;
            *distance = at - place;
        }
        size_t before = coder->previous[place % (WINDOW / 2)];
        place = before < place ? before : NOWHERE;
    }
    coder->previous[at % (WINDOW / 2)] = *head;
    *head = (uint16_t)at;
    return best >= LEAST_MATCH ? best : 0;
}

/* Matches as (0, length, distance in two bytes), literals as (count, bytes). At most size bytes of output,
 * and 1 for each 255 and one more. */
static size_t compress_window(struct coder *coder, size_t size) {
    /* NOWHERE, in each of them. What the places before say of former ones is never asked. */
    memset(coder->head, 0xff, (1 << HASH_BITS) * sizeof(uint16_t));
    size_t out = 0;
    size_t literals = 0; /* that wait to be written, before at */
    for (size_t at = 0; at < size;) {
        size_t distance = 0;
        size_t length = find_match(coder, at, size, &distance);
        literals += length == 0 ? 1 : 0;
        at += length == 0 ? 1 : 0;
        if (literals > 0 && (length > 0 || literals == 255 || at == size)) {
            coder->pending[out++] = (unsigned char)literals;
            memcpy(coder->pending + out, coder->window + at - literals, literals);
            out += literals;
            literals = 0;
        }
        if (length > 0) {
            coder->pending[out++] = 0;
            coder->pending[out++] = (unsigned char)length;
            coder->pending[out++] = (unsigned char)(distance & 255);
            coder->pending[out++] = (unsigned char)(distance >> 8);
            at += length;
        }
    }
    return out;
}

static size_t compress(const unsigned char *bytes, size_t size, unsigned char *output) {
    struct coder coder = coder_init();
    size_t out = 0;
    for (size_t at = 0; at < size;) {
        size_t part = least_of(size - at, STRETCH);
        memcpy(coder.window, bytes + at, part);
        size_t length = compress_window(&coder, part);
        memcpy(output + out, coder.pending, length);
        out += length;
        at += part;
    }
    coder_end(&coder);
    return out;
}

static void compress_unique(struct pipeline *pipeline) {
    struct chunk *chunk;
    while ((chunk = queue_pop(&pipeline->unique)) != NULL) {
        size_t worst = chunk->size + chunk->size / 255 + chunk->size / STRETCH + 2;
        unsigned char *output = checked(malloc(worst), program_name);
        chunk->output_bytes = compress(chunk->bytes, chunk->size, output);
        chunk->output = checked(realloc(output, chunk->output_bytes + 1), program_name);
        free(chunk->bytes);
        chunk->bytes = NULL;
        queue_push(&pipeline->done, chunk);
    }
    queue_leave(&pipeline->done);
}

/* A chunk's content the first time that it comes in the stream's order, and its number later. */
static void write_out(struct pipeline *pipeline, struct chunk *chunk) {
    struct entry *entry = chunk->entry;
    if (!entry->written) {
        entry->written = true;
        entry->number = pipeline->stored++;
        pipeline->output_bytes += entry->output_bytes;
        uint64_t key[2];
        hash_content(entry->output, entry->output_bytes, key);
        pipeline->checksum = checksum_add(pipeline->checksum, key[0]);
        free(entry->output);
        entry->output = NULL;
    }
    pipeline->checksum = checksum_add(pipeline->checksum, entry->number);
    pipeline->output_bytes += sizeof entry->number;
    pipeline->total++;
    free(chunk);
}

static void keep(struct waiting *waiting, struct chunk *chunk) {
    if (chunk->index >= waiting->room) {
        size_t room = 2 * chunk->index + 16;
        waiting->chunks = checked(realloc(waiting->chunks, room * sizeof(struct chunk *)), program_name);
        memset(waiting->chunks + waiting->room, 0, (room - waiting->room) * sizeof(struct chunk *));
        waiting->room = room;
    }
    waiting->chunks[chunk->index] = chunk;
    if (chunk->output != NULL) {
        chunk->entry->output = chunk->output;
        chunk->entry->output_bytes = chunk->output_bytes;
        chunk->entry->arrived = true;
    }
}

static void put_into_order(struct pipeline *pipeline) {
    unsigned long pieces =
        pipeline->bytes / (pipeline->piece_bytes / 2) + pipeline->bytes / pipeline->block_bytes + 2;
    struct waiting *all = checked(calloc(pieces, sizeof *all), program_name);
    unsigned long piece = 0;
    unsigned long index = 0;
    struct chunk *chunk;
    while ((chunk = queue_pop(&pipeline->done)) != NULL) {
        keep(&all[chunk->piece], chunk);
        /* The content may be under way with a later chunk: then that one's arrival lets this one through. */
        while (piece < pieces && index < all[piece].room && (chunk = all[piece].chunks[index]) != NULL &&
               chunk->entry->arrived) {
            index++;
            if (chunk->last) {
                free(all[piece++].chunks);
                index = 0;
            }
            write_out(pipeline, chunk);
        }
    }
    free(all);
}

/* Threads: one that cuts coarsely, one that puts into order, and then each stage's. */
static void run_stage(unsigned long thread, void *shared) {
    struct pipeline *pipeline = shared;
    if (thread == 0) {
        cut_coarsely(pipeline);
    } else if (thread == 1) {
        put_into_order(pipeline);
    } else if ((thread - 2) % 3 == 0) {
        cut_finely(pipeline);
    } else if ((thread - 2) % 3 == 1) {
        deduplicate(pipeline);
    } else {
        compress_unique(pipeline);
    }
}

static struct pipeline *prepare(unsigned long threads, unsigned long depth) {
    struct pipeline *pipeline = checked(calloc(1, sizeof *pipeline), program_name);
    queue_init(&pipeline->pieces, depth, 1);
    queue_init(&pipeline->chunks, 64 * depth, threads);
    queue_init(&pipeline->unique, 64 * depth, threads);
    queue_init(&pipeline->done, 64 * depth, 2 * threads);
    pipeline->buckets = checked(calloc(BUCKETS, sizeof(struct entry *)), program_name);
    for (int i = 0; i < LOCKS; i++) {
        (void)pthread_mutex_init(&pipeline->locks[i], NULL);
    }
    unsigned long long random = 1;
    for (int i = 0; i < WORDS; i++) {
        for (int j = 0; j < WORD_BYTES; j++) {
            pipeline->words[i][j] = (unsigned char)random_between(&random, 'a', 'z');
        }
        pipeline->gear[i] = random_next(&random);
    }
    return pipeline;
}

static void dispose(struct pipeline *pipeline) {
    for (size_t i = 0; i < BUCKETS; i++) {
        for (struct entry *entry = pipeline->buckets[i]; entry != NULL;) {
            struct entry *next = entry->next;
            free(entry);
            entry = next;
        }
    }
    free(pipeline->buckets);
    free(pipeline->pieces.ring);
    free(pipeline->chunks.ring);
    free(pipeline->unique.ring);
    free(pipeline->done.ring);
    free(pipeline);
}

int main(int argc, char **argv) {
    unsigned long threads = 2;
    unsigned long mib = 256;
    unsigned long block = 64;
    unsigned long piece = 1024;
    unsigned long chunk_bits = 12;
    unsigned long repeats = 50;
    unsigned long depth = 16;
    const struct option_spec options[] = {
        {"threads", "threads of each of the three parallel stages", OPTION_COUNT, &threads, 1, 1024, NULL},
        {"mib", "MiB of the stream", OPTION_COUNT, &mib, 1, 1UL << 20, NULL},
        {"block", "MiB read at a time", OPTION_COUNT, &block, 1, 1UL << 12, NULL},
        {"piece", "average KiB of a piece of the first cut", OPTION_COUNT, &piece, 16, 1UL << 18, NULL},
        {"chunk-bits", "the second cut's chunks have 2 to this power bytes on average", OPTION_COUNT,
         &chunk_bits, 10, 20, NULL},
        {"repeats", "percentage of repeated segments", OPTION_COUNT, &repeats, 0, 100, NULL},
        {"depth", "maximum number of pieces waiting between the first two stages", OPTION_COUNT, &depth, 1,
         1UL << 16, NULL},
    };
    const struct program_spec program = {
        .name = program_name,
        .summary = "A pipeline cuts a stream into chunks, finds repeated ones, and compresses the others.",
        .options = options,
        .option_count = sizeof options / sizeof options[0],
    };
    options_parse(&program, argc, argv);

    struct pipeline *pipeline = prepare(threads, depth);
    pipeline->bytes = mib << 20;
    pipeline->block_bytes = block << 20;
    pipeline->piece_bytes = piece << 10;
    pipeline->chunk_mask = (1UL << chunk_bits) - 1;
    pipeline->repeats = repeats;
    double seconds = run_threads(program_name, 2 + 3 * threads, run_stage, pipeline);

    printf("{\"workload\": \"dedup-like\", \"threads\": %lu, \"mib\": %lu, \"block\": %lu, \"piece\": %lu, "
           "\"chunk-bits\": %lu, "
           "\"repeats\": %lu, \"depth\": %lu, \"chunks\": %lu, \"stored\": %lu, \"output_bytes\": %lu, "
           "\"checksum\": \"%016llx\", \"seconds\": %.6f}\n",
           threads, mib, block, piece, chunk_bits, repeats, depth, pipeline->total, pipeline->stored,
           pipeline->output_bytes, pipeline->checksum, seconds);
    dispose(pipeline);
    return 0;
}
