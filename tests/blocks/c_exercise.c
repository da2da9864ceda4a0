/* Run by test_sanitizers.py, built with the C core and a sanitizer. Modes:
 *   model DIR SEED     random writes, discards, restacks, resizes and reopens against a flat array
 *   threads DIR        readers, writers, flushes and restacks at once
 *   open FILE...       open each file as a layer, read all of it if it opens
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "lsmt.h"

#define SIZE (2u << 20)
#define UUID "01234567-89ab-cdef-0123-456789abcdef"

static void fail(const struct fault *fault)
{
    fprintf(stderr, "%s: %s\n", fault->field, fault->text);
    abort();
}

static struct upper *new_upper(const char *folder, int number, uint64_t size)
{
    char data[512], index[512];
    struct fault fault;
    struct upper *upper;
    struct upper_recovery recovery;
    snprintf(data, sizeof data, "%s/%d.data", folder, number);
    snprintf(index, sizeof index, "%s/%d.index", folder, number);
    if (upper_create(data, index, size, UUID, NULL, &fault) || upper_open(data, index, &upper, &recovery, &fault))
        fail(&fault);
    return upper;
}

static void check(struct image *image, const uint8_t *model, uint64_t size)
{
    uint8_t *buffer = malloc(size);
    assert(image_read(image, buffer, size, 0) == 0);
    for (uint64_t i = 0; i < size; i++)
        if (buffer[i] != model[i]) {
            fprintf(stderr, "byte %llu is %d and should be %d\n", (unsigned long long)i, buffer[i], model[i]);
            abort();
        }
    free(buffer);
}

static void restack(struct image *image, const char *folder, int number)
{
    struct fault fault;
    struct upper *old;
    if (image_restack(image, new_upper(folder, number, image_size(image)), &old, &fault) || upper_seal(old, &fault))
        fail(&fault);
    upper_close(old);
}

static void run_model(const char *folder, unsigned seed)
{
    static uint8_t model[2 * SIZE], data[1 << 17];
    struct fault fault;
    struct image *image;
    uint64_t size = SIZE;
    int number = 0;
    srandom(seed);
    if (image_new(NULL, new_upper(folder, number++, size), false, &image, &fault))
        fail(&fault);
    for (int step = 0; step < 3000; step++) {
        uint64_t offset = (uint64_t)random() % (size / 512) * 512, length = (1 + (uint64_t)random() % 64) * 512;
        int what = (int)(random() % 100);
        length = length < size - offset ? length : size - offset;
        if (what < 75) {
            memset(data, what < 70 ? 1 + (int)(random() % 255) : 0, length);
            assert(image_write(image, data, length, offset) == 0);
            memcpy(model + offset, data, length);
        } else if (what < 95) {
            assert(image_discard(image, offset, length) == 0);
            memset(model + offset, 0, length);
        } else if (what < 97) {
            restack(image, folder, number++);
        } else if (what < 98) {
            uint64_t next = (1 + (uint64_t)random() % (2 * SIZE / 512)) * 512;
            assert(image_resize(image, next) == 0);
            if (next < size)
                memset(model + next, 0, size - next);
            size = next;
        } else {
            assert(image_flush(image) == 0);
        }
        if (step % 200 == 0)
            check(image, model, size);
    }
    check(image, model, size);
    struct stack *stack = image_stack(image);
    struct index *flat = stack ? stack_flatten(stack) : NULL;
    struct index_cursor cursor = {0, 0};
    struct segment found;
    for (; flat && index_at(flat, &cursor, &found); cursor.slot++) {
        struct index_cursor again = index_find(flat, seg_offset(&found));
        assert(again.block == cursor.block && again.slot == cursor.slot);
    }
    index_unref(flat);
    stack_unref(stack);
    image_free(image);
}

/* --- threads: sector n of a slot always holds one repeated byte, so that a torn read shows --------------------- */

struct shared {
    struct image *image;
    _Atomic int running;
};

static void *reader(void *opaque)
{
    struct shared *shared = opaque;
    uint8_t buffer[4096];
    unsigned seed = 7;
    while (shared->running) {
        uint64_t at = (uint64_t)rand_r(&seed) % (SIZE / 4096) * 4096;
        assert(image_read(shared->image, buffer, sizeof buffer, at) == 0);
        for (unsigned i = 1; i < sizeof buffer; i++)
            assert(buffer[i] == buffer[0]);
    }
    return NULL;
}

static void *writer(void *opaque)
{
    struct shared *shared = opaque;
    uint8_t buffer[4096];
    unsigned seed = (unsigned)(uintptr_t)&buffer;
    for (int i = 0; i < 4000; i++) {
        uint64_t at = (uint64_t)rand_r(&seed) % (SIZE / 4096) * 4096;
        memset(buffer, i, sizeof buffer);
        if (i % 10 == 0)
            assert(image_discard(shared->image, at, sizeof buffer) == 0);
        else
            assert(image_write(shared->image, buffer, sizeof buffer, at) == 0);
        if (i % 500 == 0)
            assert(image_flush(shared->image) == 0);
    }
    return NULL;
}

static void run_threads(const char *folder)
{
    struct shared shared = {.running = 1};
    struct fault fault;
    pthread_t readers[2], writers[2];
    if (image_new(NULL, new_upper(folder, 0, SIZE), false, &shared.image, &fault))
        fail(&fault);
    for (int i = 0; i < 2; i++) {
        pthread_create(&readers[i], NULL, reader, &shared);
        pthread_create(&writers[i], NULL, writer, &shared);
    }
    for (int i = 1; i < 40; i++)
        restack(shared.image, folder, i);
    for (int i = 0; i < 2; i++)
        pthread_join(writers[i], NULL);
    shared.running = 0;
    for (int i = 0; i < 2; i++)
        pthread_join(readers[i], NULL);
    image_free(shared.image);
}

static void run_open(const char *path)
{
    struct layer *layer;
    struct index *index;
    struct stack *stack;
    struct fault fault;
    if (layer_open(path, &layer, &index, &fault))
        return;
    if (stack_new(&layer, &index, 1, &stack, &fault))
        fail(&fault);
    uint8_t *buffer = malloc(1 << 20);
    for (uint64_t at = 0; at < stack->virtual_size && at < (8u << 20); at += 512u << 10)
        if (stack_read(stack, buffer, 512u << 10, at, at & 1 << 19))
            break;
    free(buffer);
    stack_unref(stack);
    index_unref(index);
    layer_unref(layer);
}

int main(int count, char **arguments)
{
    if (count >= 4 && strcmp(arguments[1], "model") == 0)
        run_model(arguments[2], (unsigned)atoi(arguments[3]));
    else if (count >= 3 && strcmp(arguments[1], "threads") == 0)
        run_threads(arguments[2]);
    else if (count >= 3 && strcmp(arguments[1], "open") == 0)
        for (int i = 2; i < count; i++)
            run_open(arguments[i]);
    else
        return 2;
    puts("done");
    return 0;
}
