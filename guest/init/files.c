/* Small text files. */
#include "init.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

ssize_t file_read(const char *path, char *buffer, size_t size) {
    /* O_NONBLOCK: an image may have put a FIFO where we expect a file. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return -1;
    size_t used = 0;
    while (used < size - 1) {
        ssize_t got = read(fd, buffer + used, size - 1 - used);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            int error = errno;
            close(fd);
            errno = error;
            return -1;
        }
        if (got == 0)
            break;
        used += (size_t)got;
    }
    close(fd);
    buffer[used] = 0;
    return (ssize_t)used;
}

int file_write(const char *path, const char *text, mode_t mode, bool append) {
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK | (append ? O_APPEND : O_TRUNC), mode);
    if (fd < 0)
        return -1;
    size_t left = strlen(text);
    while (left > 0) {
        ssize_t put = write(fd, text, left);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0) {
            int error = put < 0 ? errno : ENOSPC;
            close(fd);
            errno = error;
            return -1;
        }
        text += put;
        left -= (size_t)put;
    }
    return close(fd);
}

/* Is `word` one of the blank-separated words of `text`, outside of comments? */
bool has_word(const char *text, const char *word) {
    size_t length = strlen(word);
    while (*text) {
        if (*text == '#') {
            text += strcspn(text, "\n");
        } else if (isspace((unsigned char)*text)) {
            text++;
        } else {
            size_t size = strcspn(text, " \t\r\n#");
            if (size == length && strncmp(text, word, length) == 0)
                return true;
            text += size;
        }
    }
    return false;
}
