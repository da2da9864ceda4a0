/* Faults, checksums, and reads and writes that do not stop half way. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
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

/* Tables of the CRC register after one byte, and after CRC_LANE zero bytes (to join lanes computed in parallel). */
static uint32_t crc_byte[256];
static uint32_t crc_lane[4][256];
static bool crc_in_hardware;

static uint32_t crc_software(uint32_t crc, const uint8_t *data, size_t length)
{
    while (length--)
        crc = crc >> 8 ^ crc_byte[(crc ^ *data++) & 0xff];
    return crc;
}

__attribute__((constructor)) static void crc_prepare(void)
{
    static const uint8_t zeros[CRC_LANE];
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? CRC_POLYNOMIAL : 0);
        crc_byte[i] = crc;
    }
    for (int byte = 0; byte < 4; byte++)
        for (uint32_t i = 0; i < 256; i++)
            crc_lane[byte][i] = crc_software(i << 8 * byte, zeros, sizeof zeros);
#ifdef __x86_64__
    __builtin_cpu_init();
    crc_in_hardware = __builtin_cpu_supports("sse4.2");
#endif
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
