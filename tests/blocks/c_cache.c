/* Run by test_remote_cache.py, built with the C core and a sanitizer. Modes:
 *   threads DIR LIMIT ROUNDS                readers, fetchers that fail at times, evictions, a layer that comes and goes
 *   kill DIR LIMIT ROUNDS                   a process is killed while it fetches and evicts; what it left is checked
 *   damage DIR ROUNDS                       bytes of the files are changed, cut off or punched out between two openings
 */
#define _GNU_SOURCE
#include <assert.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lsmt_cache.h"

#define LAYERS 3
#define CHUNK (64u << 10)
#define FETCHERS 3
#define READERS 6
static const uint64_t SIZES[LAYERS] = {(1u << 20) + 1234, CHUNK / 2, (2u << 20)};
static const char *const NAMES[LAYERS] = {"layer-a", "layer-b", "layer-c"};

static uint8_t byte_at(int layer, uint64_t at) { return (uint8_t)((at * 2654435761u >> 11) + (uint64_t)layer * 77 + 1); }

static void fill(int layer, uint8_t *out, uint64_t at, size_t length)
{
    for (size_t i = 0; i < length; i++)
        out[i] = byte_at(layer, at + i);
}

struct world {
    struct cache *cache;
    struct origin *origin;
    pthread_t fetcher[FETCHERS];
    int failures; /* of 100 fetches */
    int rounds;
};

static int layer_of(const char *name)
{
    for (int i = 0; i < LAYERS; i++)
        if (strcmp(NAMES[i], name) == 0)
            return i;
    abort();
}

static void *fetcher(void *opaque)
{
    struct world *world = opaque;
    unsigned seed = (unsigned)(uintptr_t)&seed;
    while (!origin_closed(world->origin)) {
        struct fetch *fetch = origin_take(world->origin, 1000);
        if (!fetch)
            continue;
        int layer = layer_of(remote_name(fetch->remote));
        bool fails = rand_r(&seed) % 100 < world->failures;
        unsigned good = fails ? (unsigned)rand_r(&seed) % fetch->count : fetch->count;
        for (unsigned i = 0; i < good; i++) {
            uint64_t at = (uint64_t)i * CHUNK;
            size_t length = fetch->length - at < CHUNK ? fetch->length - at : CHUNK;
            fill(layer, (uint8_t *)fetch->buffer + at, fetch->offset + at, length);
            fetch_deliver(fetch);
        }
        fetch_end(fetch, fails ? -111 : 0);
        fetch_unref(fetch);
    }
    return NULL;
}

static void begin(struct world *world, const char *folder, uint64_t limit, int failures)
{
    struct fault fault;
    struct cache_options options = {.limit = limit, .chunk_size = CHUNK, .fetch_bytes = 4 * CHUNK, .readahead = 8 * CHUNK,
                                    .wait_ms = 60000, .prefetch_most = 1};
    if (cache_open(folder, &options, &world->cache, &fault)) {
        fprintf(stderr, "%s: %s\n", fault.field, fault.text);
        abort();
    }
    world->origin = origin_new(world->cache);
    world->failures = failures;
    for (int i = 0; i < FETCHERS; i++)
        pthread_create(&world->fetcher[i], NULL, fetcher, world);
}

static void end(struct world *world)
{
    origin_close(world->origin);
    for (int i = 0; i < FETCHERS; i++)
        pthread_join(world->fetcher[i], NULL);
    origin_unref(world->origin);
    cache_unref(world->cache);
}

static struct source *attach(struct world *world, int layer)
{
    struct fault fault;
    struct source *source;
    if (cache_attach(world->cache, NAMES[layer], SIZES[layer], 0, world->origin, &source, &fault)) {
        fprintf(stderr, "%s: %s\n", fault.field, fault.text);
        abort();
    }
    return source;
}

static int check(struct source *source, int layer, uint8_t *buffer, size_t length, uint64_t at, bool direct)
{
    int rc = source->read(source, buffer, length, at, direct);
    for (size_t i = 0; !rc && i < length; i++)
        if (buffer[i] != byte_at(layer, at + i)) {
            fprintf(stderr, "%s: byte %llu is %d\n", NAMES[layer], (unsigned long long)(at + i), buffer[i]);
            abort();
        }
    return rc;
}

static void *reader(void *opaque)
{
    struct world *world = opaque;
    unsigned seed = (unsigned)(uintptr_t)&seed;
    uint8_t *buffer = malloc(1 << 18);
    for (int i = 0; i < world->rounds; i++) {
        int layer = rand_r(&seed) % LAYERS;
        struct source *source = attach(world, layer);
        for (int j = 0; j < 8; j++) {
            uint64_t at = (uint64_t)rand_r(&seed) % SIZES[layer], length = 1 + (uint64_t)rand_r(&seed) % (1 << 18);
            length = length < SIZES[layer] - at ? length : SIZES[layer] - at;
            int rc = check(source, layer, buffer, length, at, rand_r(&seed) & 1);
            assert(rc == 0 || (world->failures && rc == -111));
        }
        uint64_t chunks[3] = {0, 1, SIZES[layer] / CHUNK};
        if (i % 8 == 0)
            remote_prefetch(remote_of(source), chunks, 3, i & 8, i & 16);
        source->close(source);
    }
    free(buffer);
    return NULL;
}

static void run_readers(struct world *world, int rounds)
{
    pthread_t readers[READERS];
    world->rounds = rounds;
    for (int i = 0; i < READERS; i++)
        pthread_create(&readers[i], NULL, reader, world);
    for (int i = 0; i < READERS; i++)
        pthread_join(readers[i], NULL);
}

static uint64_t allocated(const char *folder)
{
    uint64_t bytes = 0;
    for (int i = 0; i < LAYERS; i++) {
        char path[512];
        struct stat status;
        snprintf(path, sizeof path, "%s/%s.data", folder, NAMES[i]);
        if (stat(path, &status) == 0)
            bytes += (uint64_t)status.st_blocks * 512;
    }
    return bytes;
}

static void check_bounds(struct world *world, const char *folder, uint64_t limit)
{
    struct cache_stats stats;
    cache_get_stats(world->cache, &stats);
    assert(stats.used_bytes <= limit);
    assert(stats.in_flight == 0 && stats.waiting == 0);
    assert(allocated(folder) <= limit + LAYERS * 4096); /* the last chunk of a layer ends inside a block */
}

static void run_threads(const char *folder, uint64_t limit, int rounds)
{
    for (int failures = 0; failures <= 10; failures += 10) {
        struct world world = {0};
        begin(&world, folder, limit, failures);
        struct source *source = attach(&world, 0);
        struct remote *remote = remote_of(source);
        struct trace *trace = trace_start(world.cache, &remote, 1, 5);
        run_readers(&world, rounds);
        struct trace_entry entries[8];
        assert(trace_copy(trace, entries, 8) == trace_count(trace) && trace_count(trace) <= 5);
        trace_free(trace);
        origin_close(world.origin);
        for (int i = 0; i < FETCHERS; i++)
            pthread_join(world.fetcher[i], NULL);
        check_bounds(&world, folder, limit);
        source->close(source);
        origin_unref(world.origin);
        cache_unref(world.cache);
    }
}

static void check_all(const char *folder, uint64_t limit)
{
    struct world world = {0};
    uint8_t *buffer = malloc(2u << 20);
    begin(&world, folder, limit, 0);
    assert(allocated(folder) <= limit + LAYERS * 4096);
    for (int layer = 0; layer < LAYERS; layer++) {
        struct source *source = attach(&world, layer);
        assert(check(source, layer, buffer, SIZES[layer], 0, layer & 1) == 0);
        source->close(source);
    }
    free(buffer);
    end(&world);
}

static void run_kill(const char *folder, uint64_t limit, int rounds)
{
    for (int round = 0; round < rounds; round++) {
        pid_t child = fork();
        if (child == 0) {
            struct world world = {0};
            begin(&world, folder, limit, 5);
            run_readers(&world, 1 << 30);
        }
        usleep(2000 + (useconds_t)(random() % 30000));
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        child = fork(); /* threads of the check must not be there at the next fork */
        if (child == 0) {
            check_all(folder, limit);
            exit(0);
        }
        int status;
        waitpid(child, &status, 0);
        assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

static void damage_file(const char *path)
{
    struct stat status;
    int fd = open(path, O_RDWR);
    if (fd < 0 || fstat(fd, &status))
        return;
    for (int i = 0; i < 3; i++) {
        off_t at = random() % (status.st_size + 1);
        uint8_t bytes[16];
        for (unsigned j = 0; j < sizeof bytes; j++)
            bytes[j] = (uint8_t)random();
        switch (random() % 8) {
        case 0:
            assert(ftruncate(fd, at) == 0);
            break;
        case 1:
        case 2:
            fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, 1 + random() % (2 * CHUNK));
            break;
        default:
            assert(pwrite(fd, bytes, 1 + (size_t)random() % sizeof bytes, at) > 0);
        }
    }
    close(fd);
}

static void run_damage(const char *folder, int rounds)
{
    for (int round = 0; round < rounds; round++) {
        check_all(folder, 64 << 20);
        for (int i = 0; i < LAYERS; i++) {
            char path[512];
            snprintf(path, sizeof path, "%s/%s.%s", folder, NAMES[i], random() & 1 ? "map" : "data");
            damage_file(path);
            if (random() % 10 == 0)
                unlink(path);
        }
    }
    check_all(folder, 64 << 20);
}

int main(int count, char **arguments)
{
    srandom((unsigned)getpid());
    if (count == 5 && strcmp(arguments[1], "threads") == 0)
        run_threads(arguments[2], strtoull(arguments[3], NULL, 10), atoi(arguments[4]));
    else if (count == 5 && strcmp(arguments[1], "kill") == 0)
        run_kill(arguments[2], strtoull(arguments[3], NULL, 10), atoi(arguments[4]));
    else if (count == 4 && strcmp(arguments[1], "damage") == 0)
        run_damage(arguments[2], atoi(arguments[3]));
    else
        return 2;
    puts("done");
    return 0;
}
