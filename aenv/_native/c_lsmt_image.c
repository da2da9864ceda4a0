/* Images: what a front end serves. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "lsmt_extents.h"

struct image {
    struct block_device device;
    struct stack *stack; /* NULL: nothing below the writable layer */
    struct upper *upper; /* NULL: read-only */
    bool direct;
    bool remote; /* a layer of the stack is; a restack adds none that is */
    /* Held for reading during every operation on a writable image; a restack waits for all of them. A read-only image
     * never changes and takes no lock. */
    pthread_rwlock_t life;
    _Atomic uint64_t reads, read_bytes, writes, write_bytes, discards, flushes, restacks, errors;
};

static void count(_Atomic uint64_t *number, uint64_t amount)
{
    atomic_fetch_add_explicit(number, amount, memory_order_relaxed);
}

static int counted(struct image *image, int rc)
{
    if (rc)
        count(&image->errors, 1);
    return rc;
}

static int read_extents(struct image *image, const struct extents *extents, char *buffer)
{
    for (unsigned i = 0; i < extents->count; i++) {
        const struct extent *extent = &extents->extent[i];
        size_t bytes = extent->sectors * LSMT_SECTOR;
        int rc = 0;
        if (extent->origin == EXTENT_ZERO)
            memset(buffer, 0, bytes);
        else if (extent->origin == EXTENT_UPPER)
            rc = upper_read_at(image->upper, buffer, bytes, extent->moffset * LSMT_SECTOR);
        else
            rc = stack_read_extent(image->stack, extent, buffer, image->direct);
        if (rc) /* a short or damaged layer is an I/O error for the guest, never zeros */
            return rc == -EAGAIN ? rc : -EIO;
        buffer += bytes;
    }
    return 0;
}

/* Reads as zeros, and as long as nobody writes to it the kernel backs all of it with one page. */
static const char zeros[1 << 20];

static const void *lend_extent(struct image *image, const struct extent *extent)
{
    size_t bytes = extent->sectors * LSMT_SECTOR;
    if (extent->origin == EXTENT_ZERO)
        return bytes <= sizeof zeros ? zeros : NULL;
    if (extent->origin == EXTENT_UPPER)
        return upper_lend(image->upper, bytes, extent->moffset * LSMT_SECTOR);
    return stack_lend_extent(image->stack, extent);
}

static bool lend_extents(struct image *image, const struct extents *extents, struct iovec *pieces)
{
    for (unsigned i = 0; i < extents->count; i++) {
        const void *bytes = lend_extent(image, &extents->extent[i]);
        if (!bytes)
            return false;
        pieces[i] = (struct iovec){(void *)bytes, extents->extent[i].sectors * LSMT_SECTOR};
    }
    return true;
}

static void resolve(struct image *image, uint64_t end, struct extents *extents)
{
    extents->count = 0;
    if (image->upper) {
        pthread_rwlock_rdlock(upper_lock(image->upper));
        extents_resolve_map(upper_map(image->upper), image->stack, end, extents);
        pthread_rwlock_unlock(upper_lock(image->upper));
    } else {
        extents_resolve(image->stack, 0, end, extents);
    }
}

static int lend_all(struct image *image, size_t length, uint64_t offset, lend_t use, void *opaque)
{
    struct extents extents;
    struct iovec pieces[EXTENTS_MAX];
    uint64_t end = (offset + length) / LSMT_SECTOR;
    extents.end = offset / LSMT_SECTOR;
    resolve(image, end, &extents);
    if (extents.end < end || !lend_extents(image, &extents, pieces))
        return -EOPNOTSUPP;
    return use(opaque, pieces, (int)extents.count);
}

static int read_all(struct image *image, void *buffer, size_t length, uint64_t offset)
{
    char *at = buffer;
    uint64_t end = (offset + length) / LSMT_SECTOR;
    struct extents extents; /* too large to be cleared for each read */
    extents.end = offset / LSMT_SECTOR;
    while (extents.end < end) {
        uint64_t begin = extents.end;
        resolve(image, end, &extents);
        /* Data is never overwritten in place: what was found stays true without the lock. */
        int rc = read_extents(image, &extents, at);
        if (rc)
            return rc;
        at += (extents.end - begin) * LSMT_SECTOR;
    }
    return 0;
}

/* With `life` held, or read-only. */
static uint64_t size_of(const struct image *image)
{
    return image->upper ? upper_virtual_size(image->upper) : image->stack->virtual_size;
}

static bool fits(const struct image *image, uint64_t offset, uint64_t length)
{
    uint64_t size = size_of(image);
    return offset % LSMT_SECTOR == 0 && length % LSMT_SECTOR == 0 && offset <= size && length <= size - offset;
}

static int read_locked(struct image *image, void *buffer, size_t length, uint64_t offset)
{
    int rc = -EINVAL;
    if (image->device.read_only)
        return fits(image, offset, length) ? read_all(image, buffer, length, offset) : rc;
    pthread_rwlock_rdlock(&image->life);
    if (fits(image, offset, length))
        rc = read_all(image, buffer, length, offset);
    pthread_rwlock_unlock(&image->life);
    return rc;
}

static int try_read(struct image *image, void *buffer, size_t length, uint64_t offset)
{
    bool before = source_may_wait(false);
    int rc = read_locked(image, buffer, length, offset);
    source_may_wait(before);
    return rc;
}

static int read_stack_extents(struct stack *stack, const struct extents *extents, char *buffer, bool direct)
{
    for (unsigned i = 0; i < extents->count; i++) {
        const struct extent *extent = &extents->extent[i];
        if (extent->origin >= 0 && stack_read_extent(stack, extent, buffer, direct))
            return -EIO;
        buffer += extent->sectors * LSMT_SECTOR;
    }
    return 0;
}

static int read_upper_extents(struct image *image, const struct extents *extents, char *buffer)
{
    for (unsigned i = 0; i < extents->count; i++) {
        const struct extent *extent = &extents->extent[i];
        size_t bytes = extent->sectors * LSMT_SECTOR;
        if (extent->origin == EXTENT_ZERO)
            memset(buffer, 0, bytes);
        else if (extent->origin == EXTENT_UPPER &&
                 upper_read_at(image->upper, buffer, bytes, extent->moffset * LSMT_SECTOR))
            return -EIO;
        buffer += bytes;
    }
    return 0;
}

/* Waits for remote layers without `life`: a restack must not wait for a source that does not answer. */
static int read_waiting(struct image *image, char *buffer, size_t length, uint64_t offset)
{
    uint64_t end = (offset + length) / LSMT_SECTOR;
    struct extents extents;
    extents.end = offset / LSMT_SECTOR;
    while (extents.end < end) {
        uint64_t begin = extents.end;
        pthread_rwlock_rdlock(&image->life);
        struct stack *stack = stack_ref(image->stack);
        resolve(image, end, &extents);
        int rc = read_upper_extents(image, &extents, buffer);
        pthread_rwlock_unlock(&image->life);
        if (!rc)
            rc = read_stack_extents(stack, &extents, buffer, image->direct);
        stack_unref(stack);
        if (rc)
            return rc;
        buffer += (extents.end - begin) * LSMT_SECTOR;
    }
    return 0;
}

int image_read(struct image *image, void *buffer, size_t length, uint64_t offset)
{
    count(&image->reads, 1);
    count(&image->read_bytes, length);
    if (!image->remote)
        return counted(image, read_locked(image, buffer, length, offset));
    int rc = try_read(image, buffer, length, offset);
    return counted(image, rc == -EAGAIN ? read_waiting(image, buffer, length, offset) : rc);
}

int image_read_now(struct image *image, void *buffer, size_t length, uint64_t offset)
{
    if (!image->remote)
        return image_read(image, buffer, length, offset);
    int rc = try_read(image, buffer, length, offset);
    if (rc == -EAGAIN)
        return rc; /* it is counted when it is made again */
    count(&image->reads, 1);
    count(&image->read_bytes, length);
    return counted(image, rc);
}

int image_lend(struct image *image, size_t length, uint64_t offset, lend_t use, void *opaque)
{
    int rc = -EOPNOTSUPP;
    if (image->direct) /* what is mapped is in the page cache */
        return rc;
    if (!image->device.read_only)
        pthread_rwlock_rdlock(&image->life);
    if (fits(image, offset, length))
        rc = lend_all(image, length, offset, use, opaque);
    if (!image->device.read_only)
        pthread_rwlock_unlock(&image->life);
    if (!rc) {
        count(&image->reads, 1);
        count(&image->read_bytes, length);
    }
    return rc;
}

int image_write(struct image *image, const void *buffer, size_t length, uint64_t offset)
{
    if (image->device.read_only)
        return counted(image, -EROFS);
    count(&image->writes, 1);
    count(&image->write_bytes, length);
    pthread_rwlock_rdlock(&image->life);
    int rc = upper_write(image->upper, buffer, length, offset);
    pthread_rwlock_unlock(&image->life);
    return counted(image, rc);
}

int image_discard(struct image *image, uint64_t offset, uint64_t length)
{
    if (image->device.read_only)
        return counted(image, -EROFS);
    count(&image->discards, 1);
    pthread_rwlock_rdlock(&image->life);
    int rc = upper_discard(image->upper, offset, length);
    pthread_rwlock_unlock(&image->life);
    return counted(image, rc);
}

int image_flush(struct image *image)
{
    if (image->device.read_only)
        return 0;
    count(&image->flushes, 1);
    pthread_rwlock_rdlock(&image->life);
    int rc = upper_flush(image->upper);
    bool release = !rc && upper_wants_release(image->upper);
    pthread_rwlock_unlock(&image->life);
    if (release) {
        pthread_rwlock_wrlock(&image->life); /* waits for the reads that may have found data that is dead by now */
        upper_release(image->upper);
        pthread_rwlock_unlock(&image->life);
    }
    return counted(image, rc);
}

int image_resize(struct image *image, uint64_t virtual_size)
{
    if (image->device.read_only)
        return -EROFS;
    pthread_rwlock_wrlock(&image->life);
    uint64_t size = size_of(image), whole = virtual_size / LSMT_SECTOR * LSMT_SECTOR;
    int rc = 0;
    if (whole == virtual_size && whole < size) /* what is cut off must not come back when the image grows again */
        rc = upper_discard(image->upper, whole, size - whole);
    if (!rc)
        rc = upper_resize(image->upper, virtual_size);
    pthread_rwlock_unlock(&image->life);
    return counted(image, rc);
}

uint64_t image_size(struct image *image)
{
    if (image->device.read_only)
        return size_of(image);
    pthread_rwlock_rdlock(&image->life); /* a restack may free the layer that is asked */
    uint64_t size = size_of(image);
    pthread_rwlock_unlock(&image->life);
    return size;
}

/* --- as a block device --------------------------------------------------------------------------------------- */

static struct image *of_device(struct block_device *device) { return (struct image *)device; }

static int device_read(struct block_device *device, void *buffer, size_t length, uint64_t offset)
{
    return image_read(of_device(device), buffer, length, offset);
}

static int device_write(struct block_device *device, const void *buffer, size_t length, uint64_t offset)
{
    return image_write(of_device(device), buffer, length, offset);
}

static int device_discard(struct block_device *device, uint64_t offset, uint64_t length)
{
    return image_discard(of_device(device), offset, length);
}

static int device_lend(struct block_device *device, size_t length, uint64_t offset, lend_t use, void *opaque)
{
    return image_lend(of_device(device), length, offset, use, opaque);
}

static int device_read_now(struct block_device *device, void *buffer, size_t length, uint64_t offset)
{
    return image_read_now(of_device(device), buffer, length, offset);
}

static int device_flush(struct block_device *device) { return image_flush(of_device(device)); }

static uint64_t device_size(struct block_device *device)
{
    return image_size(of_device(device));
}

struct block_device *image_device(struct image *image) { return &image->device; }

/* --- life ---------------------------------------------------------------------------------------------------- */

int image_new(struct stack *stack, struct upper *upper, bool direct, struct image **out, struct fault *fault)
{
    pthread_rwlockattr_t attributes;
    if (!stack && !upper)
        return fault_set(fault, EINVAL, "layers", "an image needs a layer");
    if (!upper && !stack->virtual_size)
        return fault_set(fault, EINVAL, "virtual_size", "no layer says how large the image is");
    struct image *image = calloc(1, sizeof *image);
    if (!image)
        return fault_set(fault, ENOMEM, "memory", "out of memory");
    image->device = (struct block_device){device_read, device_write, device_discard, device_flush, device_lend,
                                          device_read_now, device_size, !upper};
    image->stack = stack ? stack_ref(stack) : NULL;
    image->upper = upper;
    image->direct = direct;
    image->remote = stack && stack->remote;
    pthread_rwlockattr_init(&attributes);
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&image->life, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    *out = image;
    return 0;
}

void image_free(struct image *image)
{
    if (!image)
        return;
    stack_unref(image->stack);
    upper_close(image->upper);
    pthread_rwlock_destroy(&image->life);
    free(image);
}

static int push_frozen(const struct image *image, struct upper *upper, struct stack **out, struct fault *fault)
{
    struct layer *layer;
    struct index *index;
    int rc = upper_freeze(upper, &layer, &index);
    if (rc)
        return fault_set(fault, -rc, "memory", "out of memory");
    rc = image->stack ? stack_push(image->stack, layer, index, out, fault) : stack_new(&layer, &index, 1, out, fault);
    layer_unref(layer);
    index_unref(index);
    if (rc)
        upper_thaw(upper);
    return rc;
}

int image_restack(struct image *image, struct upper *next, struct upper **old, struct fault *fault)
{
    if (image->device.read_only)
        return fault_set(fault, EROFS, "image", "is read-only");
    struct stack *stack = NULL, *below = NULL;
    pthread_rwlock_wrlock(&image->life);
    int rc = upper_virtual_size(next) == size_of(image) ? 0 :
        fault_set(fault, EINVAL, "virtual_size", "the new layer's size is not that of the image");
    if (!rc && !(rc = push_frozen(image, image->upper, &stack, fault))) {
        *old = image->upper;
        below = image->stack;
        image->upper = next;
        image->stack = stack;
    }
    pthread_rwlock_unlock(&image->life);
    stack_unref(below);
    if (!rc)
        count(&image->restacks, 1);
    return rc;
}

int image_replace(struct image *image, struct stack *stack, struct fault *fault)
{
    if (image->device.read_only)
        return fault_set(fault, EROFS, "image", "is read-only");
    pthread_rwlock_wrlock(&image->life);
    struct stack *before = image->stack;
    image->stack = stack_ref(stack);
    image->remote = stack->remote;
    pthread_rwlock_unlock(&image->life);
    stack_unref(before);
    return 0;
}

struct stack *image_stack(struct image *image)
{
    pthread_rwlock_rdlock(&image->life);
    struct stack *stack = image->stack ? stack_ref(image->stack) : NULL;
    pthread_rwlock_unlock(&image->life);
    return stack;
}

void image_upper_usage(struct image *image, uint64_t *segments, uint64_t *bytes)
{
    *segments = *bytes = 0;
    pthread_rwlock_rdlock(&image->life);
    if (image->upper) {
        *segments = upper_segments(image->upper);
        *bytes = upper_data_end(image->upper);
    }
    pthread_rwlock_unlock(&image->life);
}

void image_get_stats(const struct image *image, struct image_stats *stats)
{
    *stats = (struct image_stats){image->reads, image->read_bytes, image->writes, image->write_bytes,
                                  image->discards, image->flushes, image->restacks, image->errors};
}
