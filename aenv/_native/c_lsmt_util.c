/* Faults, checksums, and reads and writes that do not stop half way. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "lsmt.h"

int fault_set(struct fault *fault, int code, const char *field, const char *format, ...)
{
    va_list arguments;
    fault->code = code;
    snprintf(fault->field, sizeof fault->field, "%s", field);
    va_start(arguments, format);
    vsnprintf(fault->text, sizeof fault->text, format, arguments);
    va_end(arguments);
    return -code;
}

#define CRC_POLYNOMIAL 0x82F63B78u
#define CRC_LANE 1360u /* three lanes and 16 bytes make 4096 */

/* Tables of the CRC register after a byte and 0 to 7 zero bytes, and after CRC_LANE zero bytes (to join lanes computed
 * in parallel). */
static uint32_t crc_byte[8][256];
static uint32_t crc_lane[4][256];
static bool crc_in_hardware;

static uint32_t crc_software(uint32_t crc, const uint8_t *data, size_t length)
{
    for (; length >= 8; data += 8, length -= 8) {
        crc ^= (uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24;
        crc = crc_byte[7][crc & 0xff] ^ crc_byte[6][crc >> 8 & 0xff] ^ crc_byte[5][crc >> 16 & 0xff] ^
              crc_byte[4][crc >> 24] ^ crc_byte[3][data[4]] ^ crc_byte[2][data[5]] ^ crc_byte[1][data[6]] ^
              crc_byte[0][data[7]];
    }
    while (length--)
        crc = crc >> 8 ^ crc_byte[0][(crc ^ *data++) & 0xff];
    return crc;
}

#ifdef __x86_64__
static inline uint32_t crc_skip_lane(uint32_t crc)
{
    return crc_lane[0][crc & 0xff] ^ crc_lane[1][crc >> 8 & 0xff] ^ crc_lane[2][crc >> 16 & 0xff] ^
           crc_lane[3][crc >> 24];
}

static inline uint64_t load64(const uint8_t *data)
{
    uint64_t value;
    memcpy(&value, data, sizeof value);
    return value;
}

/* The instruction takes three cycles but one can start every cycle: three independent lanes keep it busy. */
__attribute__((target("sse4.2"))) static uint32_t crc_hardware(uint32_t crc, const uint8_t *data, size_t length)
{
    for (; length >= 3 * CRC_LANE; data += 3 * CRC_LANE, length -= 3 * CRC_LANE) {
        uint64_t a = crc, b = 0, c = 0;
        for (size_t i = 0; i < CRC_LANE; i += 8) {
            a = __builtin_ia32_crc32di(a, load64(data + i));
            b = __builtin_ia32_crc32di(b, load64(data + CRC_LANE + i));
            c = __builtin_ia32_crc32di(c, load64(data + 2 * CRC_LANE + i));
        }
        crc = crc_skip_lane(crc_skip_lane((uint32_t)a) ^ (uint32_t)b) ^ (uint32_t)c;
    }
    uint64_t wide = crc;
    for (; length >= 8; data += 8, length -= 8)
        wide = __builtin_ia32_crc32di(wide, load64(data));
    crc = (uint32_t)wide;
    while (length--)
        crc = __builtin_ia32_crc32qi(crc, *data++);
    return crc;
}
#endif

static void make_tables(void)
{
    static const uint8_t zeros[CRC_LANE];
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? CRC_POLYNOMIAL : 0);
        crc_byte[0][i] = crc;
    }
    for (int more = 1; more < 8; more++)
        for (uint32_t i = 0; i < 256; i++)
            crc_byte[more][i] = crc_byte[more - 1][i] >> 8 ^ crc_byte[0][crc_byte[more - 1][i] & 0xff];
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t i = 0; i < 256; i++)
            crc_lane[byte][i] = crc_software(i << 8 * byte, zeros, sizeof zeros);
}

#ifdef __x86_64__
/* Nanoseconds for 8 KiB, the best of some tries. */
static int64_t crc_time(uint32_t (*crc)(uint32_t, const uint8_t *, size_t))
{
    static const uint8_t bytes[8192];
    int64_t best = INT64_MAX;
    for (int i = 0; i < 5; i++) {
        struct timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        volatile uint32_t used = crc(1, bytes, sizeof bytes);
        (void)used;
        clock_gettime(CLOCK_MONOTONIC, &end);
        int64_t taken = (end.tv_sec - begin.tv_sec) * 1000000000ll + end.tv_nsec - begin.tv_nsec;
        best = taken < best ? taken : best;
    }
    return best;
}
#endif

__attribute__((constructor)) static void crc_prepare(void)
{
    make_tables();
#ifdef __x86_64__
    __builtin_cpu_init();
    /* Emulators have the instruction, and take longer for it than for the tables. */
    crc_in_hardware = __builtin_cpu_supports("sse4.2") && crc_time(crc_hardware) < 2 * crc_time(crc_software);
#endif
}

uint32_t crc32c_raw(uint32_t crc, const void *data, size_t length)
{
#ifdef __x86_64__
    if (crc_in_hardware)
        return crc_hardware(crc, data, length);
#endif
    return crc_software(crc, data, length);
}

bool bytes_are_zero(const void *data, size_t length)
{
    const uint8_t *bytes = data;
    size_t head = length < 16 ? length : 16;
    for (size_t i = 0; i < head; i++)
        if (bytes[i])
            return false;
    return length <= 16 || memcmp(bytes, bytes + 16, length - 16) == 0;
}

int write_fully(int fd, const void *data, size_t length, uint64_t offset)
{
    const char *bytes = data;
    while (length) {
        ssize_t done = pwrite(fd, bytes, length, (off_t)offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return -errno;
        if (done == 0)
            return -EIO;
        bytes += done, offset += (uint64_t)done, length -= (size_t)done;
    }
    return 0;
}

int read_fully(int fd, void *data, size_t length, uint64_t offset)
{
    char *bytes = data;
    while (length) {
        ssize_t done = pread(fd, bytes, length, (off_t)offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return -errno;
        if (done == 0)
            return -ENODATA;
        bytes += done, offset += (uint64_t)done, length -= (size_t)done;
    }
    return 0;
}
