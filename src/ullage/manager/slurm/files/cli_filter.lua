-- Ullage: asks how much of a GPU a job needs, in the process of the user who types sbatch. It may take a while.
-- For one job it is left out by ULLAGE=off in the environment, or by a line '#ULLAGE no-estimate' in the script.
-- Whatever goes wrong here, the job is submitted as it is.

local ULLAGE = "@ULLAGE@"
local LIMIT = 600 -- seconds

local function quoted(text)
   return "'" .. string.gsub(text, "'", "'\\''") .. "'"
end

local function asks_for_a_gpu(options)
   for _, name in ipairs({"gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"}) do
      if options[name] ~= nil and options[name] ~= "" and options[name] ~= "0" then
         return true
      end
   end
   return options["gres"] ~= nil and string.find(options["gres"], "gpu") ~= nil
end

local function comes_on_standard_input(options)
   return options["wrap"] == nil and (options["argv"] == nil or options["argv"][1] == nil)
end

local function has_hints(options)
   if comes_on_standard_input(options) then
      return true -- nobody knows
   end
   local file = options["argv"] ~= nil and options["argv"][1] ~= nil and io.open(options["argv"][1], "r")
   if not file then
      return false
   end
   local text = file:read(1048576) or ""
   file:close()
   return string.find(text, "#ULLAGE", 1, true) ~= nil
end

function slurm_cli_setup_defaults(options, early_pass)
   return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, pack_offset)
   if options["type"] ~= "sbatch" or os.getenv("ULLAGE") == "off" then
      return slurm.SUCCESS
   end
   if not asks_for_a_gpu(options) and not has_hints(options) then
      return slurm.SUCCESS
   end
   local known = quoted(slurm.json_cli_options(options))
   -- A script on standard input was read by sbatch; where that is a file, it is opened anew.
   local input = comes_on_standard_input(options) and "/proc/self/fd/0" or "/dev/null"
   local answer = io.popen("timeout " .. LIMIT .. " " .. ULLAGE .. " slurm filter " .. known .. " 2>/dev/null <" .. input)
   if answer == nil then
      return slurm.SUCCESS
   end
   local refused = false
   for line in answer:lines() do
      local name, value = string.match(line, "^([%w-]+)=(.*)$")
      if name == "say" then
         slurm.log_info("ullage: %s", value)
      elseif name == "refuse" then
         slurm.log_error("ullage: %s", value)
         refused = true
      elseif name ~= nil then
         options[name] = value
      end
   end
   answer:close()
   return refused and slurm.ERROR or slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job_id, step_id)
   return slurm.SUCCESS
end
