/* POST /files: uploads, raw or as a form, compressed or not.
 *
 * Body bytes pass [gunzip] → [multipart] → upload as they come, at most one piece of the socket (64 KiB) or TURN bytes
 * of decompressed data in one go, and are written to disk there and then. Files appear under their names only when the
 * whole body has come and is right.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/statvfs.h>

#include "entry.h"
#include "files.h"
#include "gunzip.h"
#include "multipart.h"
#include "path.h"
#include "upload.h"
#include "upload_metadata.h"

#define PIECE 65536
#define TURN (1 << 18) /* decompressed bytes written before other clients get their turn */
#define FILES_MAX 4096 /* in one form */

struct post {
	struct http_request *req;
	struct user user;
	char *path;		     /* the query's, or NULL */
	json_t *metadata;	     /* or NULL */
	struct multipart *multipart; /* NULL: the body is the file */
	struct gunzip *gunzip;	     /* NULL: the body is not compressed */
	struct event *turn;
	char *pending; /* compressed bytes that wait for the next turn */
	size_t pending_at, pending_length;
	struct upload **uploads; /* in the order of the body; the last may be open */
	size_t n_uploads;
	bool open;
	bool failed;
};

static void drop_uploads(struct post *post)
{
	for (size_t i = 0; i < post->n_uploads; i++)
		upload_free(post->uploads[i]);
	free(post->uploads);
	post->uploads = NULL;
	post->n_uploads = 0;
	post->open = false;
}

/* Answers with an error and forgets what was written. Always false. */
static bool fail(struct post *post, int status, const char *format, ...)
{
	char message[512];
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(message, sizeof message, format, arguments);
	va_end(arguments);
	post->failed = true;
	drop_uploads(post);
	http_reply_error(post->req, status, "%s", message);
	return false;
}

static bool fail_errno(struct post *post, int error, const char *path)
{
	files_reply_errno(post->req, error, path);
	post->failed = true;
	drop_uploads(post);
	return false;
}

static struct upload *current(const struct post *post)
{
	return post->uploads[post->n_uploads - 1];
}

/* Files */

static bool open_file(struct post *post, const char *raw)
{
	char path[PATH_MAX];

	if (post->n_uploads == FILES_MAX)
		return fail(post, 400, "more than %d files in one request", FILES_MAX);
	if (!files_resolve(post->req, &post->user, raw, strlen(raw), path)) {
		post->failed = true;
		drop_uploads(post);
		return false;
	}
	for (size_t i = 0; i < post->n_uploads; i++)
		if (strcmp(upload_path(post->uploads[i]), path) == 0)
			return fail(post, 400,
				    "you cannot upload multiple files to the same path '%s' in one upload request",
				    path);
	struct upload **more = realloc(post->uploads, (post->n_uploads + 1) * sizeof *more);
	if (!more)
		return fail(post, 503, "out of memory");
	post->uploads = more;
	struct upload_options options = {
		.watchers = post->req->envd->watchers,
		.path = path,
		.uid = post->user.uid,
		.gid = post->user.gid,
		.metadata = post->metadata,
	};
	more[post->n_uploads] = upload_open(&options);
	if (!more[post->n_uploads])
		return fail_errno(post, errno, path);
	post->n_uploads++;
	post->open = true;
	return true;
}

static bool write_file(struct post *post, const char *data, size_t length)
{
	if (!post->open || upload_write(current(post), data, length) == 0)
		return true;
	return fail_errno(post, errno, upload_path(current(post)));
}

static bool finish_file(struct post *post)
{
	if (!post->open)
		return true;
	post->open = false;
	if (upload_finish(current(post)) == 0)
		return true;
	if (errno == ENOTSUP)
		return fail(post, 500, "the file system of '%s' cannot store metadata", upload_path(current(post)));
	return fail_errno(post, errno, upload_path(current(post)));
}

/* Parts of a form */

static bool on_part(void *context, const char *field, const char *filename)
{
	struct post *post = context;

	if (!field || strcmp(field, "file") != 0)
		return true;
	if (!post->path && (!filename || !*filename))
		return fail(post, 400, "field 'file' has no file name, and there is no query parameter 'path'");
	return open_file(post, post->path ? post->path : filename);
}

static bool on_part_data(void *context, const char *data, size_t length)
{
	return write_file(context, data, length);
}

static bool on_part_end(void *context)
{
	return finish_file(context);
}

static const struct multipart_events PART_EVENTS = {.part = on_part, .data = on_part_data, .end = on_part_end};

/* Body */

static bool consume(struct post *post, const char *data, size_t length)
{
	if (!post->multipart)
		return write_file(post, data, length);
	if (multipart_feed(post->multipart, data, length))
		return true;
	if (!post->failed)
		return fail(post, 400, "malformed multipart body: %s", multipart_error(post->multipart));
	return false;
}

/* Decompresses from *data until it is used up or the turn is over; *more: the latter, and then there may be output to
 * come even when no input is left. False after a failure. */
static bool decompress(struct post *post, const char **data, size_t *length, bool *more)
{
	char out[PIECE];
	enum gunzip_result result;
	size_t done = 0;

	do {
		size_t produced = sizeof out;
		result = gunzip_run(post->gunzip, data, length, out, &produced);
		if (result == GUNZIP_BROKEN)
			return fail(post, 400, "body is not valid gzip");
		if (!consume(post, out, produced))
			return false;
		done += produced;
	} while (result == GUNZIP_OUTPUT && done < TURN);
	*more = result == GUNZIP_OUTPUT;
	return true;
}

static void on_turn(evutil_socket_t fd, short what, void *data)
{
	struct post *post = data;

	if (post->failed)
		return;
	const char *at = post->pending + post->pending_at;
	size_t length = post->pending_length - post->pending_at;
	bool more;
	if (!decompress(post, &at, &length, &more))
		return;
	post->pending_at = post->pending_length - length;
	if (more) {
		files_next_turn(post->turn);
		return;
	}
	free(post->pending);
	post->pending = NULL;
	http_resume_body(post->req);
}

/* Keeps what is left of a piece for the next turn and stops the client meanwhile. */
static void postpone(struct post *post, const char *data, size_t length)
{
	post->pending = malloc(length + 1);
	if (!post->pending) {
		fail(post, 503, "out of memory");
		return;
	}
	memcpy(post->pending, data, length);
	post->pending_at = 0;
	post->pending_length = length;
	http_pause_body(post->req);
	files_next_turn(post->turn);
}

static void on_body(struct http_request *req, const char *data, size_t length)
{
	struct post *post = req->state;
	bool more;

	if (post->failed)
		return;
	if (!post->gunzip)
		consume(post, data, length);
	else if (decompress(post, &data, &length, &more) && more)
		postpone(post, data, length);
}

/* End */

static json_t *answer(const struct post *post)
{
	json_t *files = json_array();

	for (size_t i = 0; i < post->n_uploads; i++) {
		const char *path = upload_path(post->uploads[i]);
		char name[PATH_MAX];
		path_base(path, name);
		json_t *file = json_pack("{s:o, s:o, s:s}", "path", entry_text(path), "name", entry_text(name), "type",
					 "file");
		if (post->metadata)
			json_object_set(file, "metadata", post->metadata);
		json_array_append_new(files, file);
	}
	return files;
}

static bool body_is_whole(struct post *post)
{
	if (post->gunzip && !gunzip_complete(post->gunzip))
		return fail(post, 400, "the gzip body ends too early");
	if (post->multipart && !multipart_complete(post->multipart))
		return fail(post, 400, "the multipart body ends too early");
	if (post->n_uploads == 0)
		return fail(post, 400, "no field 'file' in the body");
	return true;
}

static void on_end(struct http_request *req)
{
	struct post *post = req->state;

	if (post->failed || !body_is_whole(post) || !finish_file(post))
		return;
	for (size_t i = 0; i < post->n_uploads; i++)
		if (upload_commit(post->uploads[i]) != 0) {
			fail_errno(post, errno, upload_path(post->uploads[i]));
			return;
		}
	http_reply_json(req, 200, answer(post));
}

static void on_close(struct http_request *req)
{
	struct post *post = req->state;

	drop_uploads(post);
	if (post->multipart)
		multipart_free(post->multipart);
	if (post->gunzip)
		gunzip_free(post->gunzip);
	if (post->turn)
		event_free(post->turn);
	json_decref(post->metadata);
	user_clear(&post->user);
	free(post->pending);
	free(post->path);
	free(post);
}

/* Begin */

static bool is_type(const char *header, const char *type)
{
	size_t length = strlen(type);

	return strncasecmp(header, type, length) == 0 && strchr("; \t", header[length]);
}

static bool choose_decoding(struct post *post)
{
	const char *coding = http_header(post->req, "content-encoding");

	if (!coding || !*coding || strcasecmp(coding, "identity") == 0)
		return true;
	if (strcasecmp(coding, "gzip") != 0)
		return fail(post, 400, "unsupported content encoding '%.64s', supported: gzip, identity", coding);
	post->gunzip = gunzip_new();
	post->turn = event_new(post->req->envd->base, -1, 0, on_turn, post);
	return (post->gunzip && post->turn) || fail(post, 503, "out of memory");
}

/* Refuses at once what the disk cannot take, instead of filling it up for the guest's other programs first. */
static bool fits(struct post *post)
{
	int64_t length = post->gunzip ? 0 : post->req->content_length;
	struct statvfs fs;

	/* File systems of the kernel have no blocks at all. */
	if (fstatvfs(upload_descriptor(current(post)), &fs) != 0 || fs.f_blocks == 0 || length <= 0 ||
	    (uint64_t)length <= (uint64_t)fs.f_bfree * fs.f_frsize)
		return true;
	return fail_errno(post, ENOSPC, upload_path(current(post)));
}

static bool choose_form(struct post *post)
{
	const char *type = http_header(post->req, "content-type");

	if (type && is_type(type, "multipart/form-data")) {
		post->multipart = multipart_new(type, &PART_EVENTS, post);
		return post->multipart || fail(post, 400, "content type multipart/form-data without a usable boundary");
	}
	if (!type || !is_type(type, "application/octet-stream"))
		return fail(
			post, 400,
			"unsupported content type '%.64s', supported: multipart/form-data, application/octet-stream",
			type ? type : "");
	if (!post->path || !*post->path)
		return fail(post, 400, "query parameter 'path' is required");
	return open_file(post, post->path) && fits(post);
}

static void handle_post(struct http_request *req)
{
	struct post *post = calloc(1, sizeof *post);

	if (!post) {
		http_reply_error(req, 503, "out of memory");
		return;
	}
	post->req = req;
	if (!files_begin(req, "write", &post->path, &post->user)) {
		free(post);
		return;
	}
	req->state = post;
	req->on_close = on_close;
	if (!upload_metadata(req, &post->metadata)) {
		post->failed = true;
		return;
	}
	if (!choose_decoding(post) || !choose_form(post))
		return;
	req->on_body = on_body;
	req->on_end = on_end;
}

void files_post_register(struct envd *envd)
{
	http_route(envd, "POST", "/files", HTTP_PUBLIC, handle_post);
}
