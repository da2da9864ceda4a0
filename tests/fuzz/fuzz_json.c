/* Fields of JSON messages in every type that the agent reads, base64, and the environment made of them. */
#include <unistd.h>

#include "env.h"
#include "fuzz.h"
#include "jsonx.h"

static void read_fields(const json_t *object)
{
	static const char *const names[] = {"a", "aB", "camelCaseName", "processIdOfTheThingThatIsRatherLongForAName"};
	size_t i, length;

	for (i = 0; i < sizeof names / sizeof *names; i++) {
		const char *text = NULL;
		json_t *value = NULL;
		uint8_t *bytes = NULL;
		uint32_t number = 7;
		bool flag = false;

		CHECK(jx_string(object, names[i], &text) != JX_OK || text);
		CHECK(jx_object(object, names[i], &value) != JX_OK || json_is_object(value));
		CHECK(jx_array(object, names[i], &value) != JX_OK || json_is_array(value));
		CHECK(jx_u32(object, names[i], &number) == JX_OK || number == 7);
		jx_bool(object, names[i], &flag);
		if (jx_bytes(object, names[i], &bytes, &length) == JX_OK) {
			CHECK(bytes);
			bytes[length] = 0; /* promised room */
			free(bytes);
		}
	}
}

static void build_environment(json_t *vars)
{
	struct user user = {.name = "user", .home = "/home/user"};
	struct envd envd = {.env_vars = vars, .sandbox_id = "id"};
	char **env, **at;

	if (!env_valid(vars))
		return;
	env = env_build(&envd, &user, vars);
	CHECK(env && env_get(env, "PATH") && env_get(env, "E2B_SANDBOX"));
	for (at = env; *at; at++)
		CHECK(strchr(*at, '=') > *at);
	env_free(env);
}

static void check_base64(struct input *input)
{
	size_t length = input->left, out_length;
	char *data = take_piece(input, &length), *text;
	uint8_t *out;
	int padding;

	if (base64_decode_text(data, length, &out, &out_length)) {
		CHECK(out_length <= length);
		out[out_length] = 0;
		free(out);
	}
	for (padding = 0; padding < 2; padding++) {
		text = base64_encode_text(data, length, padding);
		CHECK(text && base64_decode_text(text, strlen(text), &out, &out_length));
		CHECK(out_length == length && memcmp(out, data, length) == 0);
		free(out);
		free(text);
	}
	free(data);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct input input = {data, size};
	json_t *object;

	if (take_byte(&input) == '=') {
		check_base64(&input);
		return 0;
	}
	object = json_loadb((const char *)data, size, JSON_REJECT_DUPLICATES, NULL);
	if (json_is_object(object)) {
		read_fields(object);
		build_environment(object);
	}
	json_decref(object);
	return 0;
}
